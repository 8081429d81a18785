"""Replaces names of vLLM's with ours: the only way in which this project does, by the table
`patches`.

`tests/unit/compat/test_patches.py` compares vLLM before and after, so a name that is replaced in
another way does not stay unnoticed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from vllm_dllm.compat.patches import PATCHES, SERVER

_TARGETS = {patch.target for patch in PATCHES}
_OF_SERVERS = {patch.target for patch in SERVER}
_made: dict[str, list[tuple[Any, Any]]] = {}  # by target: pairs of vLLM's own and our replacement


def is_server() -> bool:
    """Whether this process serves HTTP. Others need not import what only a server needs."""
    return "vllm.entrypoints.launchers.launcher" in sys.modules


def patch(target: str, make: Callable[[Any], Any]) -> None:
    """Replaces `target` of vLLM's by `make(stock)`, where `stock` is vLLM's own also after an
    earlier call. Does nothing for rows of `patches.SERVER` in a process that is no server.

    Args:
        target: "module:name" or "module:Class.name" below `vllm`, as in the table.
        make: returns a function, or whatever else `target` is. It gets a property or a
            staticmethod where vLLM has one.
    """
    assert target in _TARGETS, f"{target} must be in compat/patches.py"
    if target in _OF_SERVERS and not is_server():
        return
    owner, name = resolve_target(target)
    stock = get_stock(target)
    ours = make(stock)
    _made.setdefault(target, []).append((stock, ours))
    setattr(owner, name, ours)


def wrap(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that runs in place of vLLM's function or method `target`, as by `patch`.
    It gets vLLM's own as its first argument, and then those of the call."""

    def install(ours: Callable[..., Any]) -> Callable[..., Any]:
        def make(stock: Any) -> Any:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return ours(stock, *args, **kwargs)

            return replacement

        patch(target, make)
        return ours

    return install


def get_stock(target: str) -> Any:
    """Returns vLLM's own `target`, also after `patch` has replaced it."""
    owner, name = resolve_target(target)
    found = vars(owner).get(name, getattr(owner, name, None))
    return next((stock for stock, ours in _made.get(target, ()) if ours is found), found)


def set_entry(target: str, key: Any, value: Any) -> None:
    """Sets the entry `key` of vLLM's dictionary `target`, which must be in the table."""
    _dictionary(target)[key] = value


def insert_first(target: str, key: Any, value: Any) -> None:
    """Inserts `value` first in the list at `key` of vLLM's dictionary `target`. Repeatable."""
    values = _dictionary(target)[key]
    if value not in values:
        values.insert(0, value)


@contextmanager
def temporarily_patch(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `target` as `patch` does, until the context ends. Then it is vLLM's own again."""
    stock = get_stock(target)
    patch(target, make)
    try:
        yield
    finally:
        owner, name = resolve_target(target)
        setattr(owner, name, stock)


def _dictionary(target: str) -> Any:
    """Returns vLLM's dictionary `target`, which must be in the table."""
    assert f"{target}[]" in _TARGETS, f"{target}[] must be in compat/patches.py"
    owner, name = resolve_target(target)
    return getattr(owner, name)


def resolve_target(target: str) -> tuple[Any, str]:
    """Imports the module of `target`. Returns the module, class or object that has `target` as an
    attribute, and the attribute's name."""
    module, _, names = target.partition(":")
    owner, _, name = names.rpartition(".")
    return resolve_name(f"vllm.{module}:{owner}"), name
