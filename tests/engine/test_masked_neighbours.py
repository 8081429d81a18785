"""What shares an engine with a masked model's request never shows in its answer."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, GetEngine, preemptions
from tests.engine.masked import Trajectory
from tests.engine.masked_requests import (
    KINDS,
    RULES,
    VOCABULARY,
    GetMade,
    each,
    generate,
    params_of,
)
from tests.engine.one_step import random_ids
from tests.engines import asynchronous_scheduling
from vllm_dllm.scheduling.scheduler import CanvasAsyncScheduler

pytestmark = pytest.mark.numerics

MANY = [
    random_ids(length, VOCABULARY, length) for length in (1, 3, 4, 5, 13, 40, 41, 130, 200, 258)
]
FLYING, VERIFIED = "SDAR, three blocks in flight", "SDAR, some verified"
SETTINGS: dict[str, dict[str, int]] = {FLYING: {"blocks_in_flight": 3}} | {
    VERIFIED: {"blocks_in_flight": 2}
}
PREEMPTED = {"num_gpu_blocks_override": 22, "block_size": 32, "max_model_len": 416}
BEHIND = {"async_scheduling": True}  # steps before the last one's tokens are known


def mixed_params(family: str) -> list[SamplingParams]:
    """Every kind of request, each with a length and a rule of its own."""
    rules = list(RULES.values())
    mixed = [
        params_of(
            rules[seed % len(rules)]._replace(temperature=0.8 * (seed % 2)),
            50 + 7 * seed,
            seed,
            **KINDS[seed % len(KINDS)],
        )
        for seed in range(len(MANY))
    ]
    if family == "Nemotron":
        for seed, params in enumerate(mixed):
            if mode := (None, "self_speculation", "autoregressive")[seed % 3]:
                params.extra_args = {"diffusion_mode": mode}
                # Of few tokens some drafts stand.
                params.allowed_token_ids = [5, 95, 180, 275, 365, 455]
    if family in ("Fast-dLLM", VERIFIED):
        for params in mixed[1::3]:
            params.extra_args = {"diffusion_acceptance": "verified"}
            params.allowed_token_ids = [5, 95, 180, 275, 365, 455]
    return mixed


@pytest.fixture(scope="module")
def start(engine: GetEngine, made: GetMade) -> Callable[..., Engine]:
    def start(family: str, **options: Any) -> Engine:
        checkpoint = made(family.partition(",")[0], 4).checkpoint
        return engine(checkpoint, SETTINGS.get(family), **options)

    return start


@pytest.fixture(scope="module")
def undisturbed(start: Callable[..., Engine]) -> Callable[[str], list[Trajectory]]:
    """Of `MANY`, each alone and its prompt read at once."""

    @cache
    def answers(family: str) -> list[Trajectory]:
        model = start(family, enable_prefix_caching=False)
        return [
            generate(model, [prompt], [params])[0]
            for prompt, params in zip(MANY, mixed_params(family), strict=True)
        ]

    return answers


@each("SDAR", FLYING, VERIFIED, "LLaDA2.2", "Nemotron", "Fast-dLLM", thorough=("MoE", "LLaDA2"))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="together"),
        # Chunks that end inside blocks, canvases that find no room.
        pytest.param({"max_num_batched_tokens": 23}, id="chunked"),
        pytest.param(
            {"long_prefill_token_threshold": 9}, id="in small chunks", marks=pytest.mark.thorough
        ),
        pytest.param(PREEMPTED, id="preempted"),
        pytest.param(BEHIND, id="behind", marks=pytest.mark.thorough),
        pytest.param(
            BEHIND | {"max_num_seqs": 1}, id="behind, one at a time", marks=pytest.mark.thorough
        ),
        pytest.param(BEHIND | {"max_num_batched_tokens": 23}, id="behind, chunked"),
        pytest.param(BEHIND | PREEMPTED, id="behind, preempted"),
    ],
)
def test_neighbours(
    start: Callable[..., Engine],
    undisturbed: Callable[[str], list[Trajectory]],
    family: str,
    options: dict[str, Any],
) -> None:
    """All of `MANY` at once, and again from the prefix cache."""
    alone, is_ahead = undisturbed(family), "async_scheduling" in options
    with asynchronous_scheduling() if is_ahead else nullcontext():
        model = start(family, disable_log_stats=False, **options)
    assert isinstance(model.scheduler, CanvasAsyncScheduler) == is_ahead
    for _ in range(2):
        found = generate(model, MANY, mixed_params(family))
        assert [ours.tokens for ours in found] == [one.tokens for one in alone]
        if "num_gpu_blocks_override" not in options:
            for ours, one in zip(found, alone, strict=True):
                steps = ours.steps
                if is_ahead:  # when the last block is known, a step of another one is on its way
                    assert len(steps) <= len(one.steps) + 2
                    steps = steps[: len(one.steps)]
                assert steps == one.steps
    if "num_gpu_blocks_override" in options:
        assert preemptions(model) > 0
