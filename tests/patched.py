"""Names of vLLM that a test has the project replace, and that are afterwards what they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_dllm.compat import patching


@contextmanager
def patched(*targets: str) -> Iterator[None]:
    """At first, vLLM's own are there."""
    before = {}
    for target in targets:
        owner, name = patching.resolve_target(target)
        before[target] = vars(owner).get(name, getattr(owner, name, None))
        setattr(owner, name, patching.get_stock(target))
    try:
        yield
    finally:
        for target, value in before.items():
            owner, name = patching.resolve_target(target)
            setattr(owner, name, value)
