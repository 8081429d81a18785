"""One denoising step equals transformers' eager model, whatever the batch and the caches do."""

import pytest
from vllm import SamplingParams

from tests.engine import reference
from tests.engine.conftest import TRAINED, GetEngine, GetTiny
from tests.engine.one_step import (
    PREFILLS,
    assert_equal,
    assert_equal_to_reference,
    first_steps,
    is_best_guess,
    random_ids,
    read_one_step,
)

pytestmark = pytest.mark.numerics

CANVAS = 32


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("setting", PREFILLS)
def test_prompts_around_the_window(
    engine: GetEngine, tiny: GetTiny, window: int, setting: str
) -> None:
    served = engine(tiny(window), **PREFILLS[setting])
    model = reference.load(tiny(window))
    vocab_size = model.config.text_config.vocab_size
    lengths = [1, window - 1, window, window + 1, 3 * window, 10 * window]
    shared = random_ids(max(lengths), vocab_size, seed=1)  # prefixes of each other: cache hits
    prompts = [shared[:length] for length in lengths]
    canvases = [random_ids(CANVAS, vocab_size, seed=length) for length in lengths]
    expected = first_steps(model, prompts, canvases)
    for prompt, canvas, right in zip(prompts, canvases, expected, strict=True):  # each alone
        assert_equal([right], read_one_step(served, [prompt], [canvas]))
    # All together, between requests that are in their prefill, denoising and committing. There are
    # ten for eight slots: the last start while others are further.
    neighbours = [random_ids(40 + 100 * i, vocab_size, seed=100 + i) for i in range(4)]
    is_cached = served.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    read = read_one_step(served, prompts, canvases, neighbours, from_cache=is_cached)
    assert_equal(expected, read)


@pytest.mark.parametrize("width", [1, 10, 31])
def test_narrow_canvas(engine: GetEngine, tiny: GetTiny, width: int) -> None:
    served = engine(tiny(64), **PREFILLS["plain"])
    model = reference.load(tiny(64))
    prompt, canvas = random_ids(100, 512, seed=1), random_ids(width, 512, seed=2)
    read = read_one_step(served, [prompt], [canvas], xargs={"diffusion_canvas_length": width})
    assert_equal_to_reference(model, [prompt], [canvas], read)


def test_canvas_cut_short_by_the_end_of_the_context(engine: GetEngine, tiny: GetTiny) -> None:
    """It has fewer rows, and none of stock vLLM's phantom ones."""
    served = engine(tiny(64), **PREFILLS["plain"])
    model = reference.load(tiny(64))
    room = 12
    prompt = random_ids(served.llm.llm_engine.model_config.max_model_len - room, 512, seed=1)
    canvas = random_ids(CANVAS, 512, seed=2)
    read = read_one_step(served, [prompt], [canvas])
    assert_equal_to_reference(model, [prompt], [canvas[:room]], read)


def test_trained_checkpoint(engine: GetEngine) -> None:
    served = engine(TRAINED)
    model = reference.load(TRAINED)
    vocab_size = model.config.text_config.vocab_size
    window = model.config.text_config.sliding_window
    lengths = [1, window - 1, window, window + 1, 3 * window, 10 * window]
    prompts = [random_ids(length, vocab_size, seed=length) for length in lengths]
    canvases = [random_ids(model.config.canvas_length, vocab_size, seed=7) for _ in lengths]
    expected = first_steps(model, prompts, canvases)
    for prompt, canvas, right in zip(prompts, canvases, expected, strict=True):  # each alone
        assert_equal([right], read_one_step(served, [prompt], [canvas]))
    read = read_one_step(served, prompts, canvases, neighbours=[prompts[-1][:100], prompts[4]])
    assert_equal(expected, read)


def test_symmetric_rule_is_selectable_and_differs_past_the_window(
    engine: GetEngine, tiny: GetTiny
) -> None:
    """Per request; it is what stock vLLM computes, far from the reference on a long prompt."""
    served = engine(tiny(64), **PREFILLS["plain"])
    model = reference.load(tiny(64))
    prompts = [random_ids(length, 512, seed=3) for length in (4, 160, 160)]
    canvas = random_ids(CANVAS, 512, seed=4)
    rules = ["symmetric", "symmetric", "reference"]
    params = [
        SamplingParams(
            max_tokens=CANVAS,
            extra_args={
                "diffusion_seed_canvas": canvas,
                "diffusion_max_steps": 1,
                "diffusion_read_only": True,
                "diffusion_window_rule": rule,
            },
        )
        for rule in rules
    ]
    outputs = served.ask(prompts, params)  # in one batch
    agreement = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.first_step_logprobs(model, prompt, canvas)
        chosen = zip(output.outputs[0].token_ids, expected, strict=True)
        agreement.append(sum(is_best_guess(*each) for each in chosen) / CANVAS)
    short_symmetric, long_symmetric, long_reference = agreement
    assert short_symmetric == long_reference == 1.0  # all keys are within the window of 64
    assert long_symmetric < 0.9
