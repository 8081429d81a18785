"""Pinned positions keep the caller's tokens while the first canvas is denoised, and no longer."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import GetEngine, GetTiny
from tests.engine.one_step import random_ids

PINS = [0, 5, 6, 31]
Answer = Callable[..., tuple[list[dict[str, Any]], list[int]]]


@pytest.fixture
def answer(engine: GetEngine, tiny: GetTiny) -> Answer:
    """The steps of a request that pins these positions of a canvas, and its tokens."""
    served = engine(tiny(64))

    def ask(canvas: list[int], extra_args: dict[str, Any], **asked: Any) -> Any:
        extra_args |= {"diffusion_seed_canvas": canvas, "diffusion_pinned": PINS}
        params = SamplingParams(ignore_eos=True, seed=3, extra_args=extra_args, **asked)
        (output,) = served.llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        return served.steps(output.request_id), output.outputs[0].token_ids

    return ask


def test_pins_hold_through_the_first_canvas(answer: Answer) -> None:
    first_canvas = random_ids(32, 512, seed=1)
    steps, _ = answer(first_canvas, {"diffusion_max_steps": 4}, max_tokens=64)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] * 2
    pinned = [first_canvas[p] for p in PINS]
    for step in steps[:3]:
        assert [step["canvas"][p] for p in PINS] == pinned
    assert any([step["canvas"][p] for p in PINS] != pinned for step in steps[4:7])


def test_pins_are_not_emitted_where_tokens_are_revealed_for_good(answer: Answer) -> None:
    """Nor do they bring tokens that the request excludes."""
    allowed, top_k = [100, 148, 401], {"diffusion_acceptance": "top_k"}
    top_k |= {"diffusion_accept_tokens": 4}
    (first, *_, last), tokens = answer([7] * 32, top_k, max_tokens=32, allowed_token_ids=allowed)
    assert [first["canvas"][p] for p in PINS] == [7] * 4
    assert last["step"] == 8
    assert set(tokens) <= set(allowed)
