"""KV of committed blocks is the KV a prefill of the same tokens writes.

A commit that self-conditions its embeddings, even with a zero signal, writes other keys and values:
stock vLLM agreed on 0.41 of the tokens when a next turn reused them.
"""

import pytest
from vllm import SamplingParams

from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import GetEngine, GetTiny, cached_tokens, tokens_of
from tests.engine.one_step import FEW_STEPS, assert_equal_to_reference, random_ids, read_one_step

pytestmark = pytest.mark.numerics

BLOCK, PROMPT, ANSWER = 32, 32, 128  # tokens; a canvas fills a cache block


@pytest.mark.parametrize("commit_last_block", [False, True])
def test_next_turn_reuses_generated_blocks(
    engine: GetEngine, tiny: GetTiny, commit_last_block: bool, is_ahead: bool
) -> None:
    """The last block's too where the server commits it, else not: the cache holds a denoising
    step's keys and values of it."""
    window = 64 if is_ahead else 16
    served = engine(
        tiny(window),
        enable_prefix_caching=True,
        prefix_cache_retention_interval=None,
        block_size=BLOCK,
        async_scheduling=is_ahead,
        settings={"commit_last_block": commit_last_block},
    )
    model = reference.load(tiny(window))
    vocab_size = model.config.text_config.vocab_size
    prompts = [random_ids(length, vocab_size, seed=length) for length in (PROMPT, 3)]
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, extra_args=FEW_STEPS)
    outputs = served.ask(prompts, params)
    turns = [
        prompt + tokens_of(output) + random_ids(5, vocab_size, seed=9)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    read_only = random_ids(PROMPT, vocab_size, seed=10)
    params = SamplingParams(
        max_tokens=BLOCK, ignore_eos=True, extra_args=FEW_STEPS | {"diffusion_read_only": True}
    )
    block = tokens_of(*served.ask([read_only], params))
    assert len(block) == BLOCK
    assert cached_tokens(served, [*read_only, *block, 1]) == PROMPT, "it is never committed"
    canvases = [random_ids(model.config.canvas_length, vocab_size, seed=8)] * len(turns)

    for prompt, turn in zip(prompts, turns, strict=True):
        known = len(prompt) + ANSWER - (0 if commit_last_block else BLOCK)
        assert cached_tokens(served, turn) == known // BLOCK * BLOCK
    reused = read_one_step(served, turns, canvases)
    assert served.llm.reset_prefix_cache()
    prefilled = read_one_step(served, turns, canvases)

    for one, other in zip(reused, prefilled, strict=True):
        for at_one, at_other in zip(one, other, strict=True):
            both = at_one.keys() & at_other.keys()
            assert len(both) >= len(at_one) - 1, "all but the last of two that are alike"
            for token in both:
                assert abs(at_one[token] - at_other[token]) <= 2 * tolerances.LOGPROB
    assert_equal_to_reference(model, turns, canvases, reused)
