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
from vllm import LLM

from tests import tolerances

Answer = TypeVar("Answer")


def add_noise(model: torch.nn.Module, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each fp32 weight is off by a share of its own. Returns the weights, and what they were."""
    generator = torch.Generator().manual_seed(seed)
    before = []
    for weight in (parameter.data for parameter in model.parameters()):
        if weight.dtype == torch.float32:
            before.append((weight, weight.clone()))
            weight.mul_(1 + tolerances.NOISE * torch.randn(weight.shape, generator=generator))
    return before


@contextmanager
def noisy_model(model: torch.nn.Module, seed: int) -> Iterator[None]:
    before = add_noise(model, seed)
    try:
        yield
    finally:
        for weight, was in before:
            weight.copy_(was)


@contextmanager
def noisy_weights(llm: LLM, seed: int) -> Iterator[None]:
    """Of an engine in this process."""
    (before,) = llm.apply_model(lambda model: add_noise(model, seed))
    assert llm.reset_prefix_cache()
    try:
        yield
    finally:
        for weight, was in before:
            weight.copy_(was)
        assert llm.reset_prefix_cache()


def decided(
    llm: LLM, answers: Callable[[], Sequence[Answer]], key: Callable[[Answer], Any] = repr
) -> list[Answer | None]:
    """What `answers` gives; None where noise in the weights changes its `key`."""
    found: list[Answer | None] = list(answers())
    for seed in range(tolerances.NOISES):
        with noisy_weights(llm, seed):
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
