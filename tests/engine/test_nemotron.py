"""Nemotron-Labs-Diffusion decodes as its published loop does, whatever shares the engine."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests import tolerances
from tests.engine.conftest import Engine
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
from tests.engine.nemotron import SeededReference, make_nemotron_checkpoint
from tests.engine.one_step import random_ids
from vllm_dllm import plugin
from vllm_dllm.requests.ends import MAX_STOP_TOKENS

pytestmark = pytest.mark.numerics

RULES = {
    "dynamic": Rule("dynamic", threshold=0.5),
    "dynamic in few steps": Rule("dynamic", num_steps=3, threshold=0.5),
    "static": Rule("static", num_steps=3),
    "in order": Rule("sequential", num_steps=2),
    "warm": Rule("dynamic", threshold=0.3, temperature=0.8),
}
OFTEN = ("dynamic", "static", "warm")  # tried by every run of the tests
LOGPROB = min(tolerances.LOGPROB, 1e-3)


class Made(NamedTuple):
    checkpoint: Path
    reference: SeededReference


GetMade = Callable[[int], Made]
GetEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> GetMade:
    """A checkpoint and what it is compared with, by block length."""

    @cache
    def make(block_length: int) -> Made:
        path = tmp_path_factory.mktemp("nemotron")
        return Made(*make_nemotron_checkpoint(path, block_length))

    return make


@pytest.mark.parametrize(
    ("block_length", "rule"),
    [
        *((4, rule) for rule in OFTEN),
        (32, "dynamic"),
        *(pytest.param(4, rule, marks=pytest.mark.thorough) for rule in RULES if rule not in OFTEN),
        *(
            pytest.param(32, rule, marks=pytest.mark.thorough)
            for rule in RULES
            if rule != "dynamic"
        ),
    ],
)
def test_decisions(engine: GetEngine, made: GetMade, block_length: int, rule: str) -> None:
    """200 blocks of 4 tokens, 40 of 32: canvas, revealed positions, last steps, answers."""
    checkpoint, decode = made(block_length)
    prompts, max_tokens = prompts_of(block_length), 160 if block_length == 4 else 250
    params = [params_of(RULES[rule], max_tokens, seed) for seed in range(len(prompts))]
    found = generate(engine(checkpoint, block_size=32), prompts, params)
    decided, steps = 0, 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        expected = decode.generate(prompt, max_tokens, RULES[rule], seed)
        decided += expected.decided_steps(ours, RULES[rule].temperature)
        steps += len(expected.steps)
    assert decided >= steps / 3


def test_stop_tokens(engine: GetEngine, made: GetMade) -> None:
    """A block is finished when nothing is hidden before one, and the answer ends there."""
    (checkpoint, decode), rule = made(32), RULES["dynamic"]
    prompts = [random_ids(length, VOCABULARY, length) for length in (1, 20, 32, 50)]
    common = Counter(decode.generate(prompts[0], 64, rule).tokens).most_common(MAX_STOP_TOKENS)
    stops = frozenset(token for token, _ in common[1::2])
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
    turns = []
    for length in (3, 40):
        prompt = random_ids(length, VOCABULARY, length)
        (found,) = generate(model, [prompt], [params_of(rule, 128, 0)])
        turns.append(prompt + found.tokens + random_ids(5, VOCABULARY, 9))
    at_once = params_of(Rule("static", num_steps=1), 32, 0, logprobs=20)
    scores = []
    for cached in (True, False):
        outputs = model.llm.generate(
            [{"prompt_token_ids": turn} for turn in turns], at_once, use_tqdm=False
        )
        for length, output in zip((3, 40), outputs, strict=True):
            assert output.num_cached_tokens == ((length + 96) // 32 * 32 if cached else 0)
        scores.append([output.outputs[0].logprobs for output in outputs])
        assert model.llm.reset_prefix_cache()
    for turn, reused, prefilled in zip(turns, *scores, strict=True):
        (seed,) = decode.seeded_logits(turn, [])[-1:].argmax(-1).tolist()
        expected = decode.seeded_logits(turn, [seed] + [decode.mask_id] * 31)[-32:].log_softmax(-1)
        for row, one, other in zip(expected, reused, prefilled, strict=True):
            for token in one.keys() & other.keys():
                assert abs(one[token].logprob - other[token].logprob) <= 2 * LOGPROB
                assert abs(one[token].logprob - row[token]) <= LOGPROB


@pytest.mark.parametrize("block_length", [32, pytest.param(4, marks=pytest.mark.thorough)])
def test_log_probabilities(engine: GetEngine, made: GetMade, block_length: int) -> None:
    """Of one step, and of the prompt, whose tokens see those before them alone."""
    (checkpoint, decode), B = made(block_length), block_length
    prompts = prompts_of(B)
    params = params_of(Rule("static", num_steps=1), B, 0, logprobs=20, prompt_logprobs=5)
    outputs = engine(checkpoint, block_size=32).llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        causal = decode.seeded_logits(prompt, [])
        canvas = [int(causal[-1].argmax())] + [decode.mask_id] * (B - 1)
        logits = decode.seeded_logits(prompt, canvas)[-B:]
        assert list(output.outputs[0].token_ids) == [canvas[0], *logits.argmax(-1).tolist()[1:]]
        assert len(output.outputs[0].logprobs) == B
        assert len(output.prompt_logprobs) == len(prompt)
        shown = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
        expected = [*logits.log_softmax(-1), *causal[:-1].log_softmax(-1)]
        for row, scores in zip(expected, shown, strict=True):
            for token, entry in scores.items():
                assert abs(row[token] - entry.logprob) <= LOGPROB


def test_forwards(engine: GetEngine, made: GetMade, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each step, one for the prompt and one for each block but the last."""
    model = engine(made(4).checkpoint, block_size=32)
    forwards = count_forwards(model, monkeypatch)
    for prompt in prompts_of(4):
        forwards.clear()
        (found,) = generate(model, [prompt], [params_of(RULES["dynamic"], 40, 0)])
        assert len(forwards) == len(found.steps) + 10


def test_the_context_cuts_the_last_canvas(engine: GetEngine, made: GetMade) -> None:
    model = engine(made(32).checkpoint, max_model_len=110, block_size=32)
    (found,) = generate(model, [random_ids(40, VOCABULARY, 4)], [params_of(Rule(), 500, 0)])
    assert len(found.tokens) == 70


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"extra_args": {"diffusion_t_min": 0.4, "diffusion_t_max": 0.8}}, "diffusion_t_min"),
    ],
)
def test_refused_requests(
    engine: GetEngine, made: GetMade, options: dict[str, Any], error: str
) -> None:
    model = engine(made(32).checkpoint, max_model_len=110, block_size=32)
    with pytest.raises(VLLMValidationError, match=error):
        model.llm.generate([{"prompt_token_ids": [1]}], SamplingParams(**options), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hf_overrides": {"mask_token_id": -1}}, "mask_token_id in .*config.json must be"),
        (
            {"hf_overrides": {"dlm_paradigm": "block_diff"}},
            "dlm_paradigm in .*config.json must be 'bidirectional', got 'block_diff'",
        ),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, "must be at least the canvas length"),
    ],
)
def test_refused_servers(made: GetMade, options: dict[str, Any], error: str) -> None:
    plugin.register()
    with pytest.raises(ValueError, match=error):
        EngineArgs(
            str(made(32).checkpoint), **{"dtype": "float32", "max_model_len": 512, **options}
        ).create_engine_config()


def test_cached_pages_of_any_size(made: GetMade) -> None:
    """Known tokens are causal, so a part of a block may be cached."""
    plugin.register()
    options = {"dtype": "float32", "max_model_len": 512, "block_size": 48}
    config = EngineArgs(str(made(32).checkpoint), **options).create_engine_config()
    assert config.cache_config.block_size == 48
