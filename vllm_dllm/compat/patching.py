"""The one way in which this project replaces a name of vLLM's: `replace`, by the table `patches`.

`tests/unit/compat/test_patches.py` compares vLLM before and after, so a name that is replaced in
another way does not stay unnoticed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vllm_dllm.compat.patches import PATCHES

_TARGETS = {patch.target for patch in PATCHES}
_made: dict[str, list[tuple[Any, Any]]] = {}  # by target: vLLM's own, and what was made of it


def is_server() -> bool:
    """Whether this process serves HTTP. A process that does not need not import what does."""
    return "vllm.entrypoints.launchers.launcher" in sys.modules


def replace(target: str, make: Callable[[Any], Any]) -> None:
    """Puts `make(stock)` in the place of `target`, which is `stock` in vLLM.

    Repeatable: another call makes it anew of vLLM's own.

    Args:
        target: "module:name" or "module:Class.name" below `vllm`, as the table has it.
        make: Returns a function, or what else stands there; its argument is a property or a
            staticmethod where vLLM has one.
    """
    assert target in _TARGETS, f"{target} must be in compat/patches.py"
    owner, name = place(target)
    stock = stock_of(target)
    ours = make(stock)
    _made.setdefault(target, []).append((stock, ours))
    setattr(owner, name, ours)


def stock_of(target: str) -> Any:
    """What vLLM has at `target`, also once it is replaced."""
    owner, name = place(target)
    found = vars(owner).get(name, getattr(owner, name, None))
    return next((stock for stock, ours in _made.get(target, ()) if ours is found), found)


def put(target: str, key: Any, value: Any) -> None:
    """Puts `value` in vLLM's dictionary `target`. Repeatable."""
    _dictionary(target)[key] = value


def put_first(target: str, key: Any, value: Any) -> None:
    """Puts `value` at the beginning of the list that vLLM's dictionary `target` has for `key`.
    Repeatable."""
    values = _dictionary(target)[key]
    if value not in values:
        values.insert(0, value)


@contextmanager
def replaced(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Does as `replace`, and puts vLLM's own back at the end."""
    stock = stock_of(target)
    replace(target, make)
    try:
        yield
    finally:
        owner, name = place(target)
        setattr(owner, name, stock)


def _dictionary(target: str) -> Any:
    assert f"{target}[]" in _TARGETS, f"{target}[] must be in compat/patches.py"
    owner, name = place(target)
    return getattr(owner, name)


def place(target: str) -> tuple[Any, str]:
    """The module, class or object that a target is an attribute of, and the attribute's name."""
    module, _, names = target.partition(":")
    owner: Any = import_module(f"vllm.{module}")
    *classes, name = names.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name
