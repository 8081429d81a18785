"""A prompt shares its first canvas' forward, and the last canvas is not committed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.serving.conftest import Engine
from tests.serving.one_step import FEW_STEPS, random_ids

CANVAS = 32
COUNTED = {"worker_extension_cls": "bench.step_split.StepSplit", "enable_prefix_caching": False}


def forwards_of(served: Engine, prompt_length: int, blocks: int, **options: Any) -> int:
    params = SamplingParams(
        **{"max_tokens": CANVAS * blocks, "ignore_eos": True, "extra_args": FEW_STEPS, **options}
    )
    prompt = {"prompt_token_ids": random_ids(prompt_length, 512, seed=1)}
    before = served.llm.collective_rpc("num_forwards")[0]
    output = served.llm.generate(prompt, params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == params.max_tokens
    assert len(served.steps(output.request_id)) == blocks * FEW_STEPS["diffusion_max_steps"]
    return served.llm.collective_rpc("num_forwards")[0] - before


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_forwards_of_an_answer(
    engine: Callable[..., Engine], tiny: Callable[[int], Path], blocks: int
) -> None:
    """Its denoising steps and a commit between two blocks, nothing else."""
    served = engine(tiny(64), **COUNTED)
    steps = FEW_STEPS["diffusion_max_steps"]
    assert forwards_of(served, 40, blocks) == blocks * steps + blocks - 1


def test_a_stop_that_cannot_be_foreseen_costs_a_commit(
    engine: Callable[..., Engine], tiny: Callable[[int], Path]
) -> None:
    served = engine(tiny(64), **COUNTED)
    text = SamplingParams(max_tokens=CANVAS, ignore_eos=True, seed=0, extra_args=FEW_STEPS)
    prompt = {"prompt_token_ids": random_ids(40, 512, seed=1)}
    token = served.llm.generate(prompt, text, use_tqdm=False)[0].outputs[0].token_ids[5]
    many = [token, *(t for t in range(512) if t != token)][:20]
    stopping = SamplingParams(
        max_tokens=3 * CANVAS, seed=0, stop_token_ids=many, extra_args=FEW_STEPS
    )
    before = served.llm.collective_rpc("num_forwards")[0]
    output = served.llm.generate(prompt, stopping, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop" and len(output.token_ids) <= 6
    steps = FEW_STEPS["diffusion_max_steps"]
    assert served.llm.collective_rpc("num_forwards")[0] - before == steps + 1


def test_a_prompt_that_fills_the_token_budget_is_prefilled_alone(
    engine: Callable[..., Engine], tiny: Callable[[int], Path]
) -> None:
    served = engine(tiny(64), max_num_batched_tokens=96, **COUNTED)
    steps = FEW_STEPS["diffusion_max_steps"]
    assert forwards_of(served, 96 - CANVAS, 1) == steps
    assert forwards_of(served, 96 - CANVAS + 1, 1) == 1 + steps
    assert forwards_of(served, 2 * 96 - CANVAS, 1) == 1 + steps
