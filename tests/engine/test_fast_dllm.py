"""Fast-dLLM v2 decodes as its published loop does, whatever shares the engine."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests import tolerances
from tests.engine.conftest import Engine
from tests.engine.fast_dllm import ShiftedReference, make_fast_dllm_checkpoint
from tests.engine.masked import Rule, Trajectory
from tests.engine.masked_requests import (
    VOCABULARY,
    assert_as_alone,
    assert_stops,
    asynchronously,
    count_forwards,
    each_alone,
    generate,
    neighbours,
    params_of,
    prompts_of,
)
from tests.engine.one_step import random_ids
from vllm_dllm import plugin

pytestmark = pytest.mark.numerics

RULES = {
    "published": Rule("dynamic", threshold=1.0),
    "dynamic": Rule("dynamic", threshold=0.5),
    "dynamic in few steps": Rule("dynamic", num_steps=3, threshold=0.5),
    "static": Rule("static", num_steps=3),
    "in order": Rule("sequential", num_steps=2),
    "warm": Rule("dynamic", threshold=0.3, temperature=0.8),
}
OFTEN = ("published", "dynamic", "warm")  # tried by every run of the tests
LOGPROB = min(tolerances.LOGPROB, 1e-3)


class Made(NamedTuple):
    checkpoint: Path
    reference: ShiftedReference


GetMade = Callable[[int], Made]
GetEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> GetMade:
    """A checkpoint and what it is compared with, by block length."""

    @cache
    def make(block_length: int) -> Made:
        path = tmp_path_factory.mktemp("fast_dllm")
        return Made(*make_fast_dllm_checkpoint(path, block_length))

    return make


@pytest.mark.parametrize(
    ("block_length", "rule", "num_seeds"),
    [
        *((4, rule, 1) for rule in OFTEN),
        (32, "dynamic", 1),
        *(
            pytest.param(4, rule, 1, marks=pytest.mark.thorough)
            for rule in RULES
            if rule not in OFTEN
        ),
        *(
            pytest.param(32, rule, 1, marks=pytest.mark.thorough)
            for rule in RULES
            if rule != "dynamic"
        ),
        pytest.param(32, "dynamic", 6, marks=pytest.mark.thorough),
    ],
)
def test_decisions(
    engine: GetEngine, made: GetMade, block_length: int, rule: str, num_seeds: int
) -> None:
    """200 blocks of 4 tokens, 40 or 240 of 32: canvas, revealed positions, last steps, answers."""
    checkpoint, decode = made(block_length)
    max_tokens = 160 if block_length == 4 else 250
    prompts = [
        [(token + 7 * seed) % VOCABULARY for token in prompt]
        for seed in range(num_seeds)
        for prompt in prompts_of(block_length)
    ]
    params = [params_of(RULES[rule], max_tokens, seed) for seed in range(len(prompts))]
    found = generate(engine(checkpoint, block_size=32), prompts, params)
    decided, steps = 0, 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        expected = decode.generate(prompt, max_tokens, RULES[rule], seed)
        decided += expected.decided_steps(ours, RULES[rule].temperature)
        steps += len(expected.steps)
    assert decided >= steps / 3


def test_a_prompt_of_one_block_is_read(engine: GetEngine, made: GetMade) -> None:
    """The published loop forgets it."""
    checkpoint, _ = made(32)
    model, params = engine(checkpoint, block_size=32), params_of(RULES["dynamic"], 32, 0)
    prompts = [random_ids(32, VOCABULARY, seed) for seed in range(2)]
    one, other = generate(model, prompts, [params] * 2)
    assert one.tokens != other.tokens


def test_stop_tokens(engine: GetEngine, made: GetMade) -> None:
    """A block is finished when nothing is hidden before one, and the answer ends there."""
    (checkpoint, decode), rule = made(32), RULES["dynamic"]
    prompts = [random_ids(length, VOCABULARY, length) for length in (1, 20, 32, 50)]
    answer = decode.generate(prompts[0], 64, rule).tokens
    # Of the second block, and of a part of it that others follow.
    stops = frozenset([next(token for token in answer[34:] if token not in answer[:34])])
    assert_stops(engine(checkpoint, block_size=32), decode, prompts, rule, stops)


@pytest.fixture(scope="module")
def undisturbed(engine: GetEngine, made: GetMade) -> list[Trajectory]:
    return each_alone(engine, made(4).checkpoint)


@neighbours
def test_neighbours(
    engine: GetEngine, made: GetMade, undisturbed: list[Trajectory], options: dict[str, Any]
) -> None:
    assert_as_alone(engine, made(4).checkpoint, undisturbed, options)


@asynchronously
def test_asynchronous_scheduling(
    engine: GetEngine,
    made: GetMade,
    undisturbed: list[Trajectory],
    options: dict[str, Any],
    asynchronous: None,
) -> None:
    options = {"async_scheduling": True, **options}
    assert_as_alone(engine, made(4).checkpoint, undisturbed, options)


def test_committed_keys_are_a_prefill_s(engine: GetEngine, made: GetMade) -> None:
    """The next turn of a chat finds all blocks but the last, which is not committed."""
    checkpoint, decode = made(32)
    model, rule = engine(checkpoint, block_size=32), RULES["dynamic"]
    for length in (3, 40, 64):
        prompt = random_ids(length, VOCABULARY, length)
        (first,) = generate(model, [prompt], [params_of(rule, 128 - length % 32, 0)])
        turn = prompt + first.tokens + random_ids(5, VOCABULARY, 9)
        params = params_of(rule, 40, 0)
        output = model.llm.generate({"prompt_token_ids": turn}, params, use_tqdm=False)[0]
        assert output.num_cached_tokens == length // 32 * 32 + 96
        assert list(output.outputs[0].token_ids) == decode.generate(turn, 40, rule).tokens


@pytest.mark.parametrize("block_length", [32, pytest.param(4, marks=pytest.mark.thorough)])
def test_log_probabilities(engine: GetEngine, made: GetMade, block_length: int) -> None:
    """Of one step; a block's first token has those by which it was chosen."""
    (checkpoint, decode), B = made(block_length), block_length
    prompts, rule = [*prompts_of(B), random_ids(2 * B, VOCABULARY, 7)], Rule("static", num_steps=1)
    params = [
        params_of(rule, 2 * B - len(prompt) % B, 0, logprobs=20)  # this block and the next one
        for prompt in prompts
    ]
    outputs = engine(checkpoint, block_size=32).llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        known, rows = list(prompt), []
        while len(known) < len(prompt) + len(output.outputs[0].token_ids):
            start = len(known) // B * B
            block = known[start:] or [int(decode.logits(known)[-1].argmax())]
            block += [decode.mask_id] * (B - len(block))
            logits = decode.block_logits(known[:start], block)[len(known) - start :]
            known += logits.argmax(-1).tolist()
            rows.append(logits)
        assert list(output.outputs[0].token_ids) == known[len(prompt) :]
        expected = torch.cat(rows).log_softmax(-1)
        for row, scores in zip(expected, output.outputs[0].logprobs, strict=True):
            for token, entry in scores.items():
                assert abs(row[token] - entry.logprob) <= LOGPROB


def test_forwards(engine: GetEngine, made: GetMade, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each step, one for each block but the last, and one for a prompt of whole blocks:
    others share that of the first step."""
    model = engine(made(4).checkpoint, block_size=32)
    forwards = count_forwards(model, monkeypatch)
    for prompt in prompts_of(4):
        forwards.clear()
        cut = len(prompt) % 4
        (found,) = generate(model, [prompt], [params_of(RULES["dynamic"], 40 - cut, 0)])
        assert len(forwards) == len(found.steps) + 9 + (cut == 0)


def test_the_context_cuts_the_last_canvas(engine: GetEngine, made: GetMade) -> None:
    model = engine(made(32).checkpoint, max_model_len=110, block_size=32)
    (found,) = generate(model, [random_ids(40, VOCABULARY, 4)], [params_of(Rule(), 500, 0)])
    assert len(found.tokens) == 70


def test_refused_requests(engine: GetEngine, made: GetMade) -> None:
    model = engine(made(32).checkpoint, max_model_len=110, block_size=32)
    with pytest.raises(VLLMValidationError, match="prompt_logprobs is not possible"):
        params = SamplingParams(prompt_logprobs=1)
        model.llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hf_overrides": {"mask_token_id": -1}}, "mask_token_id in .*config.json must be"),
        ({"block_size": 48}, r"the model's block of 32 tokens \(bd_size in config.json\), got 48"),
    ],
)
def test_refused_servers(made: GetMade, options: dict[str, Any], error: str) -> None:
    plugin.register()
    with pytest.raises(ValueError, match=error):
        EngineArgs(
            str(made(32).checkpoint), **{"dtype": "float32", "max_model_len": 512, **options}
        ).create_engine_config()
