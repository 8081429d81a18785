"""Each sampling parameter and denoising setting has its effect on the served model's output."""

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams

from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import HELD_OUT, TRAINED, Engine
from tests.engine.rounding import assert_same

pytestmark = pytest.mark.numerics

ROWS = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
PROMPT = ROWS[0]["messages"]
EOS = 1
# Unlike anything it was trained on: what comes out depends on the noise.
ODD = [{"role": "user", "content": "kq 7 {w: 3 zx"}]
SEEDS = range(1, 5)
ALIKE = 2 * tolerances.LOGPROB  # of two runs


@pytest.fixture(scope="module")
def served(engine: Callable[..., Engine]) -> Engine:
    return engine(TRAINED, settings={"fit_canvas": True}, max_num_seqs=16, max_model_len=512)


def answers(served: Engine, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    return served.llm.chat(prompts, params, use_tqdm=False)


def ask(served: Engine, **options: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 64, "seed": 7, **options})
    return answers(served, [PROMPT], [params])[0]


def tokens(served: Engine, **options: Any) -> list[int]:
    return list(ask(served, **options).outputs[0].token_ids)


def xargs(**options: Any) -> dict[str, Any]:
    return {"extra_args": {f"diffusion_{name}": value for name, value in options.items()}}


NOISY = {"max_tokens": 64, **xargs(max_steps=3, t_min=1.0, t_max=2.0)}


def steps_of(served: Engine, output: RequestOutput) -> list[dict[str, Any]]:
    return served.steps(output.request_id)


def test_allowed_tokens_and_bias(served: Engine) -> None:
    allowed = [20, 21, 22]
    assert set(tokens(served, allowed_token_ids=allowed, ignore_eos=True)) <= set(allowed)
    assert set(tokens(served, logit_bias={33: 100.0}, ignore_eos=True)) == {33}
    without = tokens(served)
    banned = without[0]
    assert banned not in tokens(served, logit_bias={banned: -100.0}, ignore_eos=True)


def test_bad_words(served: Engine) -> None:
    first = ask(served).outputs[0]
    text = first.text
    assert "=" in text
    output = ask(served, bad_words=["="]).outputs[0]
    assert "=" not in output.text
    pair = text[:3]
    assert len(served.llm.get_tokenizer().encode(pair, add_special_tokens=False)) > 1
    for seed in range(5):
        assert pair not in ask(served, bad_words=[pair], seed=seed).outputs[0].text


@pytest.mark.parametrize("acceptance", ["confidence", "top_k"])
def test_bad_words_where_tokens_are_revealed_for_good(served: Engine, acceptance: str) -> None:
    """A position is decided between tokens that no longer change, on both of its sides."""
    words = ["aa", "bb", "ab", "ba", "a b", "b a"]
    only = served.llm.get_tokenizer().encode("ab c", add_special_tokens=False)
    for seed in range(5):
        output = ask(
            served,
            bad_words=words,
            allowed_token_ids=only,
            ignore_eos=True,
            seed=seed,
            **xargs(acceptance=acceptance, max_steps=12, t_min=1.0, t_max=2.0),
        )
        text = output.outputs[0].text
        assert set(text) <= set("ab c") and not [word for word in words if word in text], text


def test_penalties_bring_no_excluded_token_back(served: Engine) -> None:
    for penalties in (
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0, "logit_bias": {5: 100.0, 0: -100.0}},
    ):
        params = SamplingParams(
            temperature=0, max_tokens=16, allowed_token_ids=[0], ignore_eos=True, **penalties
        )
        (output,) = served.llm.generate({"prompt_token_ids": [5, 5, 5]}, params, use_tqdm=False)
        assert set(output.outputs[0].token_ids) == {0}, penalties


def test_min_tokens(served: Engine) -> None:
    assert len(tokens(served)) < 40
    kept = tokens(served, min_tokens=40, max_tokens=100)
    assert len(kept) >= 40 and EOS not in kept[:40]


def distinct(ids: Sequence[int]) -> float:
    return len(set(ids)) / len(ids)


PENALTIES = ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 4.0})


def test_penalties_make_an_answer_repeat_itself_less(served: Engine) -> None:
    long: dict[str, Any] = dict(min_tokens=128, max_tokens=128, ignore_eos=True, seed=7)
    asked = [SamplingParams(**long, **penalty) for penalty in ({}, *PENALTIES)]
    plain, *penalised = answers(served, [PROMPT] * len(asked), asked)
    for penalty, output in zip(PENALTIES, penalised, strict=True):
        assert distinct(output.outputs[0].token_ids) > distinct(plain.outputs[0].token_ids), penalty


def test_greedy_candidates(served: Engine) -> None:
    """With temperature 0 what is kept of a step is its best guess; so it is where others are left
    out."""
    for options in ({"temperature": 0.0}, {"min_p": 1.0}, {"top_p": 1e-3}, {"top_k": 1}):
        output = ask(served, **options)
        steps = steps_of(served, output)
        assert steps
        for step in steps:
            if step["finished"]:
                continue
            for token, kept, canvas in zip(
                step["tokens"], step["accepted"], step["canvas"], strict=True
            ):
                assert not kept or canvas == token


def test_temperature_scales_the_schedule(served: Engine) -> None:
    """Twice the temperature is the schedule from twice t_min to twice t_max."""
    twice = tokens(served, temperature=2.0)
    assert twice == tokens(served, **xargs(t_min=0.8, t_max=1.6))
    entropies = [
        steps_of(served, ask(served, temperature=t))[0]["entropy"] for t in (0.5, 1.0, 2.0)
    ]
    assert entropies == sorted(entropies) and entropies[0] < entropies[-1]


def test_the_servers_own_settings_change_nothing(served: Engine) -> None:
    own = xargs(
        t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence_threshold=0.005, stability_threshold=1
    )
    default, explicit = ask(served), ask(served, **own)
    assert default.outputs[0].token_ids == explicit.outputs[0].token_ids
    steps = [steps_of(served, output) for output in (default, explicit)]
    assert [s["canvas"] for s in steps[0]] == [s["canvas"] for s in steps[1]]


def test_stopping_settings(served: Engine) -> None:
    def num_steps(**options: Any) -> int:
        return len(steps_of(served, ask(served, **xargs(**options))))

    usual = num_steps()
    assert num_steps(stability_threshold=4) >= max(5, usual)
    assert num_steps(confidence_threshold=1e-9, max_steps=12) == 12
    assert num_steps(stability_threshold=0, confidence_threshold=1e6) == 1
    judged = ask(served, **xargs(judge_answer_only=1))
    assert judged.outputs[0].text == ROWS[0]["answer"]


def test_reveal_for_good(served: Engine) -> None:
    """Revealed positions keep their token, and a canvas is finished when all are."""
    for options, at_least in (
        ({"acceptance": "top_k", "accept_tokens": 16}, 16),
        ({"acceptance": "confidence", "accept_probability": 0.7}, 1),
    ):
        settings = {**options, "stability_threshold": 1000}
        steps = steps_of(served, ask(served, **xargs(**settings)))
        assert sum(steps[0]["accepted"]) >= at_least
        for earlier, later in pairwise(steps):
            for was, now, before, after in zip(
                earlier["accepted"],
                later["accepted"],
                earlier["canvas"],
                later["canvas"],
                strict=True,
            ):
                assert not was or (now and before == after)
        assert all(steps[-1]["accepted"]) and steps[-1]["finished"]
        if options["acceptance"] == "top_k":
            assert len(steps) == 4  # 64 positions


def test_acceptance_rules_still_answer(served: Engine) -> None:
    rows = ROWS[::40]
    for acceptance in ("confidence", "top_k"):
        params = [
            SamplingParams(max_tokens=128, seed=i, **xargs(acceptance=acceptance))
            for i in range(len(rows))
        ]
        outputs = answers(served, [row["messages"] for row in rows], params)
        right = sum(
            o.outputs[0].text == row["answer"] for o, row in zip(outputs, rows, strict=True)
        )
        assert right >= 0.8 * len(rows), acceptance


def test_few_tokens_take_a_narrow_canvas(served: Engine) -> None:
    output = ask(served, max_tokens=20)
    assert {len(step["canvas"]) for step in steps_of(served, output)} == {32}
    assert output.outputs[0].token_ids == tokens(served, max_tokens=64)[:20]


def test_several_answers(served: Engine) -> None:
    """Each is that of its own seed."""
    params = [
        SamplingParams(n=4, seed=1, **NOISY),
        *(SamplingParams(seed=i, **NOISY) for i in SEEDS),
    ]
    several, *each = answers(served, [ODD] * len(params), params)
    texts = [completion.text for completion in several.outputs]
    assert texts == [output.outputs[0].text for output in each]
    assert len(set(texts)) > 1


def test_truncation_comes_after_the_temperature(served: Engine) -> None:
    """At a high one the tokens are nearly alike. What the model is sure of at 1 would be all that
    is left if that were judged before."""
    hot = xargs(t_min=100.0, t_max=100.0, max_steps=1)

    def tokens_left(**options: Any) -> float:
        return math.exp(steps_of(served, ask(served, **hot, **options))[0]["entropy"])

    everything = tokens_left()
    assert everything > 450
    for left, share, options in (
        (everything / 2, 0.5, {"top_p": 0.5}),
        (everything / 10, 0.1, {"top_p": 0.1}),
        (5, 1.0, {"top_k": 5}),
        (3, 0.5, {"top_p": 0.5, "top_k": 6}),
    ):
        allowed = tolerances.tokens_left(share)
        assert tokens_left(**options) == pytest.approx(left, rel=allowed), options


def first_step(served: Engine, **options: Any) -> tuple[list[int], list[dict[int, float]]]:
    """Tokens and logprobs of the answer to an odd question after one step at temperature 2."""
    settings = xargs(t_min=1.0, t_max=2.0, max_steps=1)
    params = SamplingParams(max_tokens=64, seed=1, logprobs=20, ignore_eos=True, **settings)
    for name, value in options.items():
        setattr(params, name, value)
    output = answers(served, [ODD], [params])[0].outputs[0]
    scores = [{t: entry.logprob for t, entry in at.items()} for at in output.logprobs]
    return list(output.token_ids), scores


def test_logprobs_are_the_models_own_unless_asked_otherwise(served: Engine) -> None:
    """A bias on the tokens of the answer does not show in them."""
    plain, scores = first_step(served)
    biased, biased_scores = first_step(served, logit_bias=dict.fromkeys(plain, -3.0))
    assert biased != plain
    for before, after in zip(scores, biased_scores, strict=True):
        for token in before.keys() & after.keys():
            assert after[token] == pytest.approx(before[token], rel=0, abs=ALIKE)


def test_prompt_logprobs(served: Engine) -> None:
    """Of each prompt token after those before it, in the model's causal mode."""
    output = ask(served, prompt_logprobs=2)
    model = reference.load(TRAINED)
    ids = torch.tensor([output.prompt_token_ids])
    with torch.no_grad():
        hidden = model.model.encoder(input_ids=ids).last_hidden_state[0]
        logits = model.lm_head(hidden)
    cap = model.config.text_config.final_logit_softcapping
    expected = (torch.tanh(logits / cap) * cap).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    for position, scores in enumerate(output.prompt_logprobs[1:]):
        token = ids[0, position + 1].item()
        assert scores[token].logprob == pytest.approx(
            expected[position, token].item(), rel=0, abs=tolerances.LOGPROB
        )
    assert output.outputs[0].text == ROWS[0]["answer"]


def random_params(generator: random.Random) -> SamplingParams:
    """A neighbour of any kind."""
    options = generator.choice(
        [
            {},
            {"temperature": 1.7},
            {"temperature": 0.0},
            {"min_p": 0.2, "top_k": 7},
            {"presence_penalty": 1.0},
            {"logit_bias": {30: 3.0}},
            xargs(acceptance="top_k"),
            xargs(canvas_length=20, entropy_bound=1.0),
            xargs(t_min=0.3, t_max=1.2, stability_threshold=2),
        ]
    )
    return SamplingParams(max_tokens=generator.choice([5, 40]), **options)


def decoded(
    served: Engine, outputs: list[RequestOutput]
) -> list[tuple[list[int], list[list[int]]]]:
    """Tokens, and the canvases on the way to them."""
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return list(zip(tokens, served.canvases(outputs), strict=True))


@pytest.mark.parametrize(
    ("batch_size", "num_seeds"), [(4, 20), pytest.param(16, 50, marks=pytest.mark.thorough)]
)
def test_a_seed_gives_the_same_canvases_in_any_batch(
    served: Engine, batch_size: int, num_seeds: int
) -> None:
    generator = random.Random(batch_size)
    own = [
        SamplingParams(
            seed=seed, max_tokens=64, ignore_eos=True, **xargs(max_steps=3, t_min=1.0, t_max=2.0)
        )
        for seed in range(num_seeds)
    ]
    alone = decoded(served, [answers(served, [ODD], [params])[0] for params in own])
    together = []
    for params in own:
        prompts, batch = [ODD], [params]
        for _ in range(batch_size - 1):
            prompts.append(generator.choice(ROWS)["messages"])
            batch.append(random_params(generator))
        where = generator.randrange(batch_size)
        for column in (prompts, batch):
            column[0], column[where] = column[where], column[0]
        together.append(answers(served, prompts, batch)[where])
    found = decoded(served, together)
    assert_same(found, alone)
    assert len(set(map(str, found))) == len(own)


def test_processed_logprobs(engine: Callable[..., Engine]) -> None:
    """Of what is left of the vocabulary, biases included; the model's own were another share. The
    last test here: its engine takes the other one's place."""
    processed = engine(TRAINED, logprobs_mode="processed_logprobs")
    left = {"allowed_token_ids": list(range(80, 100))}
    plain, scores = first_step(processed, **left)
    bias = dict.fromkeys(plain, -3.0)
    biased, biased_scores = first_step(processed, **left, logit_bias=bias)
    assert biased != plain
    for before, after in zip(scores, biased_scores, strict=True):
        allowed = tolerances.softmax(20, 40.0)
        assert sum(map(math.exp, before.values())) == pytest.approx(1, rel=0, abs=allowed)
        # At temperature 2.
        moved = {token: score + bias.get(token, 0.0) / 2 for token, score in before.items()}
        total = math.log(sum(map(math.exp, moved.values())))
        for token in moved.keys() & after.keys():
            assert after[token] == pytest.approx(moved[token] - total, rel=0, abs=ALIKE)
