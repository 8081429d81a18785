"""Masked families whose blocks begin with a token that is known: Nemotron-Labs-Diffusion and
Fast-dLLM v2. What all families have in common is in `test_masked.py`."""

from collections import Counter

import pytest

from tests.engine.conftest import GetEngine
from tests.engine.fast_dllm import ShiftedReference
from tests.engine.masked import Rule
from tests.engine.masked_requests import (
    AT_ONCE,
    RULES,
    VOCABULARY,
    GetMade,
    assert_scores,
    each,
    generate,
    params_of,
    prompts_of,
)
from tests.engine.one_step import random_ids
from vllm_dllm.requests.ends import MAX_FORESEEN_STOPS

pytestmark = pytest.mark.numerics


@each("Nemotron", "Fast-dLLM")
def test_stop_tokens(engine: GetEngine, made: GetMade, family: str) -> None:
    """A block is finished when nothing is hidden before one, and the answer ends there."""
    (checkpoint, decode), rule = made(family, 32), RULES["dynamic"]
    prompts = [random_ids(length, VOCABULARY, length) for length in (1, 20, 32, 50)]
    answer = decode.generate(prompts[0], 64, rule).tokens
    if family == "Nemotron":
        stops = [token for token, _ in Counter(answer).most_common(MAX_FORESEEN_STOPS)[1::2]]
    else:  # of the second block, and of a part of it that others follow
        stops = [next(token for token in answer[34:] if token not in answer[:34])]
    params = params_of(rule, 100, 0, stop_token_ids=stops)
    found = generate(engine(checkpoint, block_size=32), prompts, [params] * len(prompts))
    for prompt, ours in zip(prompts, found, strict=True):
        expected = decode.generate(prompt, 100, rule, stops=frozenset(stops))
        assert expected.decided_steps(ours, 0.0) == len(expected.steps)
    assert any(0 in ours.steps[-1].revealed for ours in found), "none was finished early"
    assert any(len(ours.tokens) > 32 for ours in found), "none went on"


def test_fast_dllms_tokens_if_a_block_arrives_after_a_preemption(
    engine: GetEngine, made: GetMade, asynchronous: None
) -> None:
    """Of the step that ran meanwhile. The prefill then takes two steps, and the canvas must wait
    for the second one, which predicts its first token."""
    checkpoint, decode = made("Fast-dLLM", 32)
    model = engine(
        checkpoint,
        async_scheduling=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
        block_size=32,
    )
    prompt, rule = random_ids(32, VOCABULARY, 0), RULES["static"]
    expected = decode.generate(prompt, 96, rule).tokens
    core = model.llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    for last_step in range(2, 12):
        core.add_request(f"until {last_step}", {"prompt_token_ids": prompt}, params_of(rule, 96, 0))
        for _ in range(last_step):
            core.step()
        request = scheduler.running.pop()
        scheduler._preempt_request(request, 0.0)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        while core.has_unfinished_requests():
            outputs = core.step()
        assert list(outputs[-1].outputs[0].token_ids) == expected


@pytest.mark.parametrize("block_length", [32, pytest.param(4, marks=pytest.mark.thorough)])
def test_nemotrons_log_probabilities(engine: GetEngine, made: GetMade, block_length: int) -> None:
    (checkpoint, decode), B = made("Nemotron", block_length), block_length
    params = params_of(AT_ONCE, B, 0, logprobs=20, prompt_logprobs=5)
    prompts = prompts_of(B)
    outputs = engine(checkpoint, block_size=32).ask(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        causal = decode.seeded_logits(prompt, [])
        canvas = [int(causal[-1].argmax())] + [decode.mask_id] * (B - 1)
        logits = decode.seeded_logits(prompt, canvas)[-B:]
        assert list(output.outputs[0].token_ids) == [canvas[0], *logits.argmax(-1).tolist()[1:]]
        assert_scores(logits.log_softmax(-1), output.outputs[0].logprobs)
        assert_scores(causal[:-1].log_softmax(-1), output.prompt_logprobs[1:])


@pytest.mark.parametrize(
    ("block_length", "temperature"),
    [(32, 0.0), (32, 0.7), pytest.param(4, 0.0, marks=pytest.mark.thorough)],
)
def test_fast_dllms_verified_drafts(
    engine: GetEngine, made: GetMade, block_length: int, temperature: float
) -> None:
    """Of few tokens, so that some drafts stand. Greedy answers are those of decoding in blocks of
    one token, and need fewer steps."""
    checkpoint, plain = made("Fast-dLLM", block_length)
    decode, few = ShiftedReference(plain.model, block_length, plain.mask_id), [7, 40, 41, 300]
    decode.allowed, rule, prompts = few, Rule("verified", temperature=temperature), prompts_of(32)
    params = [
        params_of(rule, 96, seed, allowed_token_ids=few, logprobs=1) for seed in range(len(prompts))
    ]
    found = generate(engine(checkpoint, block_size=32), prompts, params)
    same = total = num_tokens = num_verified = 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        expected = decode.generate(prompt, 96, rule, seed)
        same += expected.decided_steps(ours, temperature)
        total += len(expected.steps)
        num_tokens, num_verified = num_tokens + 96, num_verified + len(expected.steps) // 2
        if temperature == 0:
            assert ours.tokens == decode.one_by_one(prompt, 96)
    assert same >= total / 3
    assert num_tokens > 1.2 * num_verified, "some drafts stand"
