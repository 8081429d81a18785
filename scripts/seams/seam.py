"""A place in vLLM and what it must say."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    what: str
    place: str
    """module:names below `vllm`, or the module alone."""
    line: str
    """What stands there and makes it matter."""
    since: str = "0"
    until: str | None = None
    """The first version that does not say so any more."""
