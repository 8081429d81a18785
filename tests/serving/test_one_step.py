"""One denoising step equals transformers' eager model, whatever the batch and the caches do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.serving import reference
from tests.serving.conftest import TRAINED, Engine
from tests.serving.one_step import assert_equal_to_reference, random_ids, read_one_step

CANVAS = 32
SETTINGS = {
    "plain": {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    "prefix-caching": {"enable_prefix_caching": True, "enable_chunked_prefill": False},
    "chunked-prefill": {"enable_prefix_caching": False, "max_num_batched_tokens": 96},
    "both": {"enable_prefix_caching": True, "max_num_batched_tokens": 96},
}


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("setting", SETTINGS)
def test_prompts_around_the_window(
    engine: Callable[..., Engine], tiny: Callable[[int], Path], window: int, setting: str
) -> None:
    served = engine(tiny(window), **SETTINGS[setting])
    model = reference.load(tiny(window))
    vocab_size = model.config.text_config.vocab_size
    lengths = [1, window - 1, window, window + 1, 3 * window, 10 * window]
    shared = random_ids(max(lengths), vocab_size, seed=1)  # prefixes of each other: cache hits
    prompts = [shared[:length] for length in lengths]
    canvases = [random_ids(CANVAS, vocab_size, seed=length) for length in lengths]

    for prompt, canvas in zip(prompts, canvases, strict=True):  # each alone
        read = read_one_step(served, [prompt], [canvas])
        assert_equal_to_reference(model, [prompt], [canvas], read)
    # All together, between requests that are in their prefill, denoising and committing.
    neighbours = [random_ids(40 + 150 * i, vocab_size, seed=100 + i) for i in range(3)]
    read = read_one_step(served, prompts, canvases, neighbours)
    assert_equal_to_reference(model, prompts, canvases, read)


def test_trained_checkpoint(engine: Callable[..., Engine]) -> None:
    served = engine(TRAINED)
    model = reference.load(TRAINED)
    vocab_size, window = (
        model.config.text_config.vocab_size,
        model.config.text_config.sliding_window,
    )
    lengths = [1, window - 1, window, window + 1, 3 * window, 10 * window]
    prompts = [random_ids(length, vocab_size, seed=length) for length in lengths]
    canvases = [random_ids(model.config.canvas_length, vocab_size, seed=7) for _ in lengths]
    read = read_one_step(served, prompts, canvases)
    assert_equal_to_reference(model, prompts, canvases, read)


def test_symmetric_rule_is_selectable_and_differs_past_the_window(
    engine: Callable[..., Engine], tiny: Callable[[int], Path]
) -> None:
    """Per request; it is what stock vLLM computes, far from the reference on a long prompt."""
    served = engine(tiny(16), **SETTINGS["plain"])
    model = reference.load(tiny(16))
    vocab_size = model.config.text_config.vocab_size
    agreement = {}
    for length in (4, 160):
        prompt, canvas = random_ids(length, vocab_size, 3), random_ids(CANVAS, vocab_size, 4)
        params = SamplingParams(
            max_tokens=CANVAS,
            extra_args={
                "diffusion_seed_canvas": canvas,
                "diffusion_max_steps": 1,
                "diffusion_read_only": True,
                "diffusion_window_rule": "symmetric",
            },
        )
        output = served.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        tokens = torch.tensor(output[0].outputs[0].token_ids)
        expected = reference.first_step_logprobs(model, prompt, canvas).argmax(-1)
        agreement[length] = (tokens == expected).float().mean().item()
    assert agreement[160] < 0.9
