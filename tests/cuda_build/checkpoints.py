"""Folders of models that engines here start from: shapes without weights, or the shipped ones."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = 6  # five sliding and one full, as the 26B model repeats


def dummy(folder: Path, scheme: str) -> Path:
    """The 26B model's widths in `LAYERS` layers, quantised as its published copies are."""
    from bench.dummy_checkpoint import SHAPE_26B, SHAPES, write

    shape = f"26B in {LAYERS} layers"
    SHAPES[shape] = SHAPE_26B | {"num_hidden_layers": LAYERS}
    return _once(folder, scheme, lambda made: write(made, shape, scheme, num_steps=16))


def masked(folder: Path, architecture: str) -> Path:
    """A random masked model in the published layout."""
    from tests.engine.masked import make_checkpoint

    return _once(folder, architecture, lambda made: make_checkpoint(made, 32, architecture))


def adapted(folder: Path, architecture: str, layers: list[str]) -> tuple[Path, list[Path]]:
    """The same, and two random adapters of rank 8."""
    from tests.adapters import make_adapter

    made, adapters = masked(folder, architecture), []
    for i in range(2):
        name = f"{architecture} adapter {i}"
        adapters.append(folder / name)
        if not adapters[-1].exists():
            make_adapter(adapters[-1], made, layers, i, 8)
    return made, adapters


def _once(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    made = folder / name
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.mkdir()
            write(made)
    return made
