"""What the scheduler does to a request never shows in its tokens, nor in which process it runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.serving.conftest import Engine, preemptions
from tests.serving.one_step import FEW_STEPS, random_ids

VOCABULARY = 512
FITTED = {"fit_canvas": True}
LENGTHS = (100, 3, 70, 33, 150, 64)
PROMPTS = [random_ids(LENGTHS[seed % len(LENGTHS)], VOCABULARY, seed) for seed in range(50)]
# Every second one with a first canvas of its own, some of it pinned.
PARAMS = [
    SamplingParams(
        max_tokens=70 + seed % 27,  # the last of three canvases is narrow, in part
        ignore_eos=True,
        seed=seed,
        extra_args=FEW_STEPS
        | (
            {"diffusion_seed_canvas": random_ids(32, VOCABULARY, seed), "diffusion_pinned": [3, 9]}
            if seed % 2
            else {}
        ),
    )
    for seed in range(len(PROMPTS))
]


def tokens_of(engine: Engine) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.llm.generate(inputs, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def undisturbed(engine: Callable[..., Engine], tiny: Callable[[int], Path]) -> list[list[int]]:
    """Each request alone, without async scheduling."""
    served = engine(tiny(64), settings=FITTED, max_num_seqs=1)
    return tokens_of(served)


@pytest.mark.parametrize(
    "options",
    [
        # Less than a block and its successor's canvas.
        pytest.param({"max_num_batched_tokens": 56}, id="chunked"),
        pytest.param(
            {"num_gpu_blocks_override": 40, "block_size": 32, "max_model_len": 288}, id="preempted"
        ),
    ],
)
def test_tokens_are_those_of_an_undisturbed_run(
    engine: Callable[..., Engine],
    tiny: Callable[[int], Path],
    undisturbed: list[list[int]],
    options: dict[str, Any],
) -> None:
    served = engine(tiny(64), settings=FITTED, disable_log_stats=False, **options)
    assert tokens_of(served) == undisturbed
    if "num_gpu_blocks_override" in options:
        assert preemptions(served) > 0


def test_asynchronous_scheduling(
    engine: Callable[..., Engine],
    tiny: Callable[[int], Path],
    undisturbed: list[list[int]],
    asynchronous: None,
) -> None:
    served = engine(tiny(64), settings=FITTED, async_scheduling=True)
    scheduler = served.llm.llm_engine.vllm_config.scheduler_config.scheduler_cls
    assert scheduler.endswith(".DiffusionAsyncScheduler")
    assert tokens_of(served) == undisturbed
