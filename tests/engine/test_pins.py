"""Pinned positions keep the caller's tokens while the first canvas is denoised, and no longer."""

from collections.abc import Callable
from pathlib import Path

from vllm import SamplingParams

from tests.engine.conftest import Engine
from tests.engine.one_step import random_ids


def test_pins_hold_through_the_first_canvas(
    engine: Callable[..., Engine], tiny: Callable[[int], Path]
) -> None:
    served = engine(tiny(64))
    first_canvas = random_ids(32, 512, seed=1)
    pins = [0, 5, 6, 31]
    params = SamplingParams(
        max_tokens=64,
        ignore_eos=True,
        seed=3,
        extra_args={
            "diffusion_seed_canvas": first_canvas,
            "diffusion_pinned": pins,
            "diffusion_max_steps": 4,
        },
    )
    output = served.llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
    steps = served.steps(output.request_id)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] * 2
    pinned = [first_canvas[p] for p in pins]
    for step in steps[:3]:
        assert [step["canvas"][p] for p in pins] == pinned
    assert any([step["canvas"][p] for p in pins] != pinned for step in steps[4:7])


def test_pins_are_not_emitted_where_tokens_are_revealed_for_good(
    engine: Callable[..., Engine], tiny: Callable[[int], Path]
) -> None:
    """Nor do they bring tokens that the request excludes."""
    served = engine(tiny(64))
    allowed, pins = [100, 148, 401], [0, 5, 6, 31]
    params = SamplingParams(
        max_tokens=32,
        ignore_eos=True,
        seed=3,
        allowed_token_ids=allowed,
        extra_args={
            "diffusion_seed_canvas": [7] * 32,
            "diffusion_pinned": pins,
            "diffusion_acceptance": "top_k",
            "diffusion_accept_tokens": 4,
        },
    )
    output = served.llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
    first, *_, last = served.steps(output.request_id)
    assert [first["canvas"][p] for p in pins] == [7] * 4
    assert last["step"] == 8
    assert set(output.outputs[0].token_ids) <= set(allowed)
