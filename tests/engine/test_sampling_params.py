"""Each sampling parameter and denoising setting has its effect on the served model's output."""

import math
from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import HELD_OUT, TRAINED, Engine, GetEngine, tokens_of

pytestmark = pytest.mark.numerics

PROMPT = HELD_OUT[0]["messages"]


@pytest.fixture(scope="module")
def served(engine: GetEngine) -> Engine:
    return engine(TRAINED, settings={"fit_canvas": True}, max_num_seqs=16, max_model_len=512)


def ask(served: Engine, **options: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 64, "seed": 7, **options})
    return served.llm.chat([PROMPT], [params], use_tqdm=False)[0]


def xargs(**options: Any) -> dict[str, Any]:
    return {"extra_args": {f"diffusion_{name}": value for name, value in options.items()}}


def steps_of(served: Engine, output: RequestOutput) -> list[dict[str, Any]]:
    return served.steps(output.request_id)


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


def test_temperature_scales_the_schedule(served: Engine) -> None:
    """Twice the temperature is the schedule from twice t_min to twice t_max."""
    twice = tokens_of(ask(served, temperature=2.0))
    assert twice == tokens_of(ask(served, **xargs(t_min=0.8, t_max=1.6)))
    entropies = [
        steps_of(served, ask(served, temperature=t))[0]["entropy"] for t in (0.5, 1.0, 2.0)
    ]
    assert entropies == sorted(entropies) and entropies[0] < entropies[-1]


def test_acceptance_rules_still_answer(served: Engine) -> None:
    rows = HELD_OUT[::40]
    for acceptance in ("confidence", "top_k"):
        params = [
            SamplingParams(max_tokens=128, seed=i, **xargs(acceptance=acceptance))
            for i in range(len(rows))
        ]
        outputs = served.llm.chat([row["messages"] for row in rows], params, use_tqdm=False)
        right = sum(
            o.outputs[0].text == row["answer"] for o, row in zip(outputs, rows, strict=True)
        )
        assert right >= 0.8 * len(rows), acceptance


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
    assert output.outputs[0].text == HELD_OUT[0]["answer"]


@torch.inference_mode()
def warm_up(worker: Any) -> None:
    """What `GPUModelRunner._dummy_sampler_run` of vLLM 0.33 does on GPUs, to size their cache."""
    runner = worker.model_runner
    num_reqs, sampler = runner.max_num_reqs, runner.sampler
    for slot in range(num_reqs):
        sampler.add_request(slot, SamplingParams.for_sampler_warmup())
    sampler.apply_staged_writes()
    logits = torch.zeros(num_reqs, runner.vocab_size)
    output = sampler(logits, InputBatch.make_dummy(num_reqs, num_reqs, runner.input_buffers))
    assert output.num_sampled.tolist() == [0] * num_reqs


def test_vllms_own_requests_leave_no_trace(served: Engine) -> None:
    """They are in every slot, and nobody takes them out."""
    hot = xargs(max_steps=3, t_min=1.0, t_max=2.0)
    params = [SamplingParams(max_tokens=64, seed=i, logprobs=1, **hot) for i in range(3)]

    def answers() -> list[list[int]]:
        outputs = served.llm.chat([PROMPT] * len(params), params, use_tqdm=False)
        assert all(len(scores) <= 2 for o in outputs for scores in o.outputs[0].logprobs)
        return list(map(tokens_of, outputs))

    before = answers()
    served.llm.collective_rpc(warm_up)
    assert answers() == before
