"""Nemotron-Labs-Diffusion decodes as its published loop does, whatever shares the engine."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.conftest import Engine
from tests.engine.masked import Rule
from tests.engine.nemotron import SeededReference, make_nemotron_checkpoint
from tests.engine.test_masked import generate, params_of, prompts_of

pytestmark = pytest.mark.numerics

RULES = {
    "dynamic": Rule("dynamic", threshold=0.5),
    "dynamic in few steps": Rule("dynamic", num_steps=3, threshold=0.5),
    "static": Rule("static", num_steps=3),
    "in order": Rule("sequential", num_steps=2),
    "warm": Rule("dynamic", threshold=0.3, temperature=0.8),
}


class Made(NamedTuple):
    checkpoint: Path
    reference: SeededReference


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Made]:
    """A checkpoint and what it is compared with, by block length."""

    @cache
    def make(block_length: int) -> Made:
        path = tmp_path_factory.mktemp("nemotron")
        return Made(*make_nemotron_checkpoint(path, block_length))

    return make


@pytest.mark.parametrize(
    ("block_length", "rule"),
    [*((4, rule) for rule in RULES), (32, "dynamic"), (32, "warm")],
)
def test_decisions(
    engine: Callable[..., Engine], made: Callable[[int], Made], block_length: int, rule: str
) -> None:
    """200 blocks of 4 tokens, 40 of 32: canvas, revealed positions, last steps, answers."""
    checkpoint, decode = made(block_length)
    prompts, max_tokens = prompts_of(block_length), 160 if block_length == 4 else 250
    params = [params_of(RULES[rule], max_tokens, seed) for seed in range(len(prompts))]
    found = generate(engine(checkpoint), prompts, params)
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        expected = decode.generate(prompt, max_tokens, RULES[rule], seed)
        assert ours.steps == expected.steps
        assert ours.tokens == expected.tokens
