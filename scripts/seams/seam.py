"""A place in vLLM and what it must say."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """A place in vLLM and what it must say."""

    what: str
    """What we rely on, for the error."""
    place: str
    """module:names below `vllm`, or the module alone."""
    line: str
    """Text that must be in the source there."""
    since: str = "0"
    until: str | None = None
    """The first version that no longer has it."""
