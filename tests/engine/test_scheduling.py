"""What the scheduler does to a request never shows in its tokens, nor in which process it runs."""

import random
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests import tolerances
from tests.engine.conftest import TRAINED, Engine, GetEngine, GetTiny, preemptions
from tests.engine.one_step import random_ids
from tests.engine.rounding import assert_same, decided
from vllm_dllm.compat.scheduler import SchedulerHooks
from vllm_dllm.scheduling.scheduler import CanvasAsyncScheduler

pytestmark = pytest.mark.numerics

VOCABULARY = 512
# A block. With three, rounding decides a third of the answers.
TWO_STEPS = {"diffusion_max_steps": 2}
FITTED = {"fit_canvas": True}
SMALL_CACHE: dict[str, Any] = {
    "max_model_len": 160,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
    "disable_log_stats": False,
}
LENGTHS = (100, 3, 70, 33, 150, 64)
PROMPTS = [random_ids(LENGTHS[seed % len(LENGTHS)], VOCABULARY, seed) for seed in range(50)]
# What a request carries from block to block, or that reaches back into what it has got.
KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"bad_words": ["lamp", "a", "ab", "9 1"]},
    {"logprobs": 2},
    {"min_tokens": 40, "stop_token_ids": list(range(0, 512, 9))},
    {"top_k": 9, "top_p": 0.9, "logit_bias": {7: 2.0}},
    {"temperature": 1.5, "logprobs": 0},
]


def exactly(steps: int) -> dict[str, Any]:
    """A canvas takes as many: it never converges before."""
    return {
        "diffusion_max_steps": steps,
        "diffusion_confidence_threshold": 1e-9,
        "diffusion_stability_threshold": steps,
    }


def expectation(seed: int) -> dict[str, Any]:
    """Every second one with a first canvas of its own, some of it pinned; of the others every
    second one with a prediction."""
    if seed % 2:
        return {
            "diffusion_seed_canvas": random_ids(32, VOCABULARY, seed),
            "diffusion_pinned": [3, 9],
        }
    return {"diffusion_prediction": random_ids(50 + seed, VOCABULARY, seed)} if seed % 4 else {}


PARAMS = [
    SamplingParams(
        max_tokens=70 + seed % 27,  # the last of three canvases is narrow, in part
        ignore_eos=True,
        seed=seed,
        **KINDS[seed % len(KINDS)],
        extra_args=TWO_STEPS | expectation(seed),
    )
    for seed in range(len(PROMPTS))
]


Answer = tuple[list[int], list[float]]
"""Tokens, and their log-probabilities if they were asked for."""


def answer_of(output: RequestOutput) -> Answer:
    answer = output.outputs[0]
    tokens, scores = list(answer.token_ids), answer.logprobs or []
    return tokens, [
        scores_at[token].logprob for token, scores_at in zip(tokens, scores, strict=False)
    ]


def answers_of(engine: Engine) -> list[Answer]:
    return list(map(answer_of, engine.ask(PROMPTS, PARAMS)))


def answers_of_late_ones(engine: Engine) -> list[Answer]:
    """Each request comes a step, or a few, after the one before."""
    core, waiting, done = engine.llm.llm_engine, list(range(len(PROMPTS))), {}
    pace, step = random.Random(0), 0
    while waiting or core.has_unfinished_requests():
        if waiting and (step == 0 or pace.random() < 0.5):
            seed = waiting.pop(0)
            prompt = {"prompt_token_ids": PROMPTS[seed]}
            core.add_request(f"late-{seed}", prompt, PARAMS[seed])
        step += 1
        for output in core.step():
            if output.finished:
                done[output.request_id] = answer_of(output)
    return [done[f"late-{seed}"] for seed in range(len(PROMPTS))]


its_tokens = itemgetter(0)


class Undisturbed(NamedTuple):
    answers: list[Answer | None]  # None: rounding decides its tokens
    leeway: list[float]  # of each answer's log-probabilities


def moved_by_noise(runs: Sequence[Answer]) -> float:
    """How far noise in the weights moves an answer's log-probabilities. Where rounding decides
    which expert a row goes to, that is far, whether or not a token changes."""
    (_, scores), *noisy = runs
    return max(
        (abs(a - b) for _, others in noisy for a, b in zip(scores, others, strict=True)),
        default=0.0,
    )


def assert_undisturbed(answers: list[Answer], undisturbed: Undisturbed) -> None:
    assert_same(answers, undisturbed.answers, its_tokens)
    num_scored = 0
    for (_, scores), expected, leeway in zip(answers, *undisturbed, strict=True):
        if expected is not None:
            allowed = tolerances.LOGPROB_OF_LAST_STEP + leeway
            assert scores == pytest.approx(expected[1], rel=0, abs=allowed)
            num_scored += len(scores) > 0
    assert num_scored > 10


@pytest.fixture(scope="module")
def undisturbed(engine: GetEngine, tiny: GetTiny) -> Undisturbed:
    """Each request alone, without async scheduling."""
    served = engine(tiny(64), settings=FITTED, max_num_seqs=1)
    runs: list[list[Answer]] = []

    def run() -> list[Answer]:
        runs.append(answers_of(served))
        return runs[-1]

    answers = decided(served.llm, run, its_tokens)
    return Undisturbed(answers, [moved_by_noise(of_one) for of_one in zip(*runs, strict=True)])


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
    engine: GetEngine, tiny: GetTiny, undisturbed: Undisturbed, options: dict[str, Any]
) -> None:
    served = engine(tiny(64), settings=FITTED, disable_log_stats=False, **options)
    assert_undisturbed(answers_of(served), undisturbed)
    if "num_gpu_blocks_override" in options:
        assert preemptions(served) > 0
    assert_undisturbed(answers_of_late_ones(served), undisturbed)


def test_asynchronous_scheduling(
    engine: GetEngine, tiny: GetTiny, undisturbed: Undisturbed, asynchronous: None
) -> None:
    served = engine(tiny(64), settings=FITTED, async_scheduling=True)
    assert isinstance(served.scheduler, CanvasAsyncScheduler)
    assert_undisturbed(answers_of(served), undisturbed)


def test_what_lost_its_place_in_a_step_is_not_in_the_prefix_cache(
    engine: GetEngine, asynchronous: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of one request have a prompt in common. One loses its place in a step that has
    already got the next part of that prompt. Requests start and are preempted in vLLM's order
    here, in which three are enough."""
    monkeypatch.setattr(SchedulerHooks, "leave_room_beside_prompts", lambda *_: None)
    monkeypatch.setattr(SchedulerHooks, "add_request", Scheduler.add_request)
    served = engine(
        TRAINED,
        settings=FITTED,
        scheduling_policy="priority",
        async_scheduling=True,
        long_prefill_token_threshold=64,
        **SMALL_CACHE,
    )
    core = served.llm.llm_engine
    prompt, other = random_ids(140, VOCABULARY, 0), random_ids(100, VOCABULARY, 1)
    steps = {"diffusion_max_steps": 4}
    params = SamplingParams(n=2, seed=0, max_tokens=5, logprobs=3, extra_args=steps)
    long = SamplingParams(seed=1, max_tokens=40, extra_args=steps)

    def scores(name: str) -> list[float]:
        core.add_request(name, {"prompt_token_ids": prompt}, params)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.request_id == name and output.finished:
                    rows = [row for answer in output.outputs for row in answer.logprobs or ()]
        return [entry.logprob for row in rows for entry in row.values()]

    alone, before = scores("alone"), preemptions(served)
    assert served.llm.reset_prefix_cache()
    core.add_request("other", {"prompt_token_ids": other}, long)
    for _ in range(3):
        core.step()
    found = scores("in company")
    assert preemptions(served) > before
    assert found == pytest.approx(alone, rel=0, abs=tolerances.LOGPROB_OF_LAST_STEP)


def test_answers_of_one_request_do_not_preempt_each_other_for_ever(
    engine: GetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one priority and one time of arrival, and there is no room for all three. They
    start as soon as their prompts fit here, or they would hardly preempt each other."""
    monkeypatch.setattr(SchedulerHooks, "leave_room_beside_prompts", lambda *_: None)
    served = engine(TRAINED, settings=FITTED, scheduling_policy="priority", **SMALL_CACHE)
    core, before = served.llm.llm_engine, preemptions(served)
    params = SamplingParams(n=3, max_tokens=60, ignore_eos=True, extra_args=exactly(8))
    core.add_request("three", {"prompt_token_ids": random_ids(19, VOCABULARY, 0)}, params)
    for _ in range(200):
        core.step()
    unfinished = core.has_unfinished_requests()
    core.abort_request(["three"])
    assert not unfinished and preemptions(served) > before


def test_a_request_starts_when_its_canvas_has_room_too(engine: GetEngine, is_ahead: bool) -> None:
    """Else it starts as soon as its prompt fits, loses its place to the first canvas, and starts
    again, a step later."""
    served = engine(TRAINED, settings=FITTED, async_scheduling=is_ahead, **SMALL_CACHE)
    before = preemptions(served)
    params = SamplingParams(n=3, seed=0, max_tokens=60, ignore_eos=True, extra_args=exactly(40))
    served.ask([random_ids(19, VOCABULARY, 0)], params)
    assert preemptions(served) - before <= 3


def test_a_context_that_is_fitted_to_memory_ends_answers(engine: GetEngine, is_ahead: bool) -> None:
    """vLLM lowers `--max-model-len auto` after the model is loaded."""
    served = engine(
        TRAINED,
        settings=FITTED,
        async_scheduling=is_ahead,
        max_model_len=-1,
        kv_cache_memory_bytes=1 << 20,
    )
    core = served.llm.llm_engine
    longest = core.model_config.max_model_len
    assert longest < 4096, "memory is short"
    prompt = random_ids(longest - 85, VOCABULARY, 0)
    params = SamplingParams(max_tokens=85, ignore_eos=True, temperature=0.0)
    core.add_request("longest", {"prompt_token_ids": prompt}, params)
    answers = [output for _ in range(300) for output in core.step() if output.finished]
    core.abort_request(["longest"])
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [85]
