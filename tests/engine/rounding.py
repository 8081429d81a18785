"""Which answers rounding decides.

Two ways to compute one answer add in another order. Where two tokens are equally probable but for
the last digits, or a draw falls on the boundary between two, that decides which is taken, and
whatever comes after it. Such an answer says nothing about either way: those are compared that stay
the same when weights are off by several roundings, and they must be most.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tests import tolerances
from tests.engine.conftest import Engine

Answer = TypeVar("Answer")


@contextmanager
def noisy_weights(engine: Engine, seed: int) -> Iterator[None]:
    """The fp32 weights of an engine in this process are off, each by a share of its own."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def disturb(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            if weight.dtype == torch.float32:
                kept.append((weight.data, weight.data.clone()))
                noise = torch.randn(weight.shape, generator=generator)
                weight.data.mul_(1 + tolerances.NOISE * noise)

    engine.llm.apply_model(disturb)
    assert engine.llm.reset_prefix_cache()
    try:
        yield
    finally:
        for weight, before in kept:
            weight.copy_(before)
        assert engine.llm.reset_prefix_cache()


def decided(
    engine: Engine, answers: Callable[[], Sequence[Answer]], key: Callable[[Answer], Any] = repr
) -> list[Answer | None]:
    """What `answers` gives; None where noise in the weights changes its `key`."""
    found: list[Answer | None] = list(answers())
    for seed in range(tolerances.NOISES):
        with noisy_weights(engine, seed):
            noisy = answers()
        found = [
            a if a is not None and key(a) == key(b) else None
            for a, b in zip(found, noisy, strict=True)
        ]
    share = sum(answer is not None for answer in found) / len(found)
    assert share >= tolerances.DECIDED, f"rounding decides {1 - share:.0%} of the answers"
    return found


def assert_same(
    answers: Sequence[Answer],
    expected: Sequence[Answer | None],
    key: Callable[[Answer], Any] = repr,
) -> None:
    """Where they are decided."""
    for i, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        assert other is None or key(answer) == key(other), f"answer {i}"
