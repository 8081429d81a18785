"""What the runner gets of a step: a column of each request, whether it has a canvas or not, and
log-probabilities."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_worker import Worker

from tests import tolerances
from tests.unit.step.batches import canvas_batch
from tests.unit.step.worker import C, GetWorker, V, noise, params, sure
from vllm_dllm.denoise.step import temperature
from vllm_dllm.requests.options import load_options
from vllm_dllm.step.asked.logprobs import StepLogprobs
from vllm_dllm.step.masked.masked_step import MaskedStep
from vllm_dllm.step.runner.sampler import DiffusionSampler
from vllm_dllm.step.runner.worker import CanvasWorker
from vllm_dllm.step.slots import NewRequest

BLOCK = [21, 22, 23, 24]


def test_requests_in_their_prefill_get_nothing(worker: GetWorker) -> None:
    one = worker()
    one.admit("first", prompt=9, computed=0)
    one.admit("a")
    one.admit("last", prompt=9, computed=2)
    one.step({"a": sure(BLOCK)})
    step = one.step({"first": noise(6), "a": sure(BLOCK), "last": noise(7)})
    assert step.emitted == {"first": [], "a": BLOCK, "last": []}
    assert step.rejected == {"first": 0, "a": C, "last": 0}
    assert one.requests["first"].computed == 6 and one.requests["last"].computed == 9


def test_what_the_runner_reads(worker: GetWorker) -> None:
    one = worker().admit("a")
    for says in (sure(BLOCK), sure(BLOCK)):
        batch = one._batch({"a": C}, late=0)
        one.stepping.begin_step(batch)
        out = one.sampler(says, batch)
        assert out.sampled_token_ids.shape == (1, C)
        for column in (out.sampled_token_ids, out.num_sampled, out.num_rejected):
            assert column.dtype == torch.int32
    assert out.sampled_token_ids.tolist() == [BLOCK] and out.num_sampled.tolist() == [C]


def test_a_block_that_is_not_whole_is_computed_again(worker: GetWorker) -> None:
    """Of a model whose known tokens see their whole block; a block of the prompt stays."""
    one = worker(MaskedStep, "SDARForCausalLM")
    one.admit("prefill", prompt=C + 3, computed=0)
    one.admit("whole", prompt=2 * C, computed=0)
    one.admit("a", prompt=C + 2, computed=C, max_tokens=20, diffusion_max_steps=1)
    step = one.step({"prefill": noise(C + 3), "whole": noise(2 * C), "a": sure(BLOCK)})
    assert step.rejected == {"prefill": 3, "whole": 0, "a": C}
    assert step.emitted["a"] == BLOCK[2:], "beside two known tokens"
    alone = worker(MaskedStep, "SDARForCausalLM")
    alone.admit("prefill", prompt=C + 3, computed=0)
    assert alone.step({"prefill": noise(C + 3)}).rejected == {"prefill": 3}


def test_asked_for_meanwhile(worker: GetWorker) -> None:
    one = worker()
    wanted = params(diffusion_max_steps=7)

    def num_steps(name: str) -> int:
        one.admit(name)
        return int(one.slots.host_values("num_steps", one.slot(name)))

    with pytest.raises(KeyError), one.sampler.replace_params(wanted):
        assert num_steps("a") == 7
        raise KeyError
    assert num_steps("b") == 48


def test_it_takes_the_place_of_vllms_sampler(worker: GetWorker) -> None:
    one = worker().admit("a", carried={"joins_commits": False})
    assert not one.sampler.joins_commits
    one.admit("b")
    assert one.sampler.joins_commits
    assert one.sampler.penalties_state.output_bin_counts is None
    assert one.sampler.req_states is one.req_states


def test_memory_is_measured_with_plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 adds a request to each slot that asks for everything, and leaves it there."""
    sampler = object.__new__(DiffusionSampler)
    added: list[SamplingParams] = []
    requests = SimpleNamespace(add_request=lambda slot, params: added.append(params))
    sampler.step, sampler._replacement = SimpleNamespace(requests=requests), None

    def measure(worker: CanvasWorker) -> int:
        sampler.add_request(0, SamplingParams.for_sampler_warmup())
        return 7

    monkeypatch.setattr(Worker, "determine_available_memory", measure)
    worker = object.__new__(CanvasWorker)
    state = SimpleNamespace(drop_graphs=lambda: None)
    worker.model_runner = SimpleNamespace(sampler=sampler, model_state=state)
    assert worker.determine_available_memory() == 7
    assert added == [SamplingParams()]


LARGEST = 30.0


def doubtful(tokens: Sequence[int], seed: int) -> torch.Tensor:
    """[L, V] fp32: logits of a model that finds `tokens` likely."""
    return noise(len(tokens), seed, scale=1.0) + sure(tokens, nats=14.0)


def at_step(step: int, most: int = 48) -> torch.Tensor:
    """[1, 1] fp32: the temperature of a canvas' step, counted from 1."""
    done, steps = torch.tensor([step - 1]), torch.tensor([most])
    return temperature(done, steps, torch.tensor([0.4]), torch.tensor([0.4]))[:, None]


def assert_scores(
    found: LogprobsTensors | None,
    rows: slice,
    tokens: Sequence[int],
    logits: torch.Tensor,  # [L, V] fp32, raw
    temperature: torch.Tensor | float,
    count: int,  # of likely tokens besides
) -> None:
    assert found is not None
    logprobs = (logits / temperature).log_softmax(dim=-1)
    columns = torch.cat((torch.tensor(tokens)[:, None], logits.topk(count).indices), dim=1)
    assert found.logprob_token_ids[rows, : 1 + count].equal(columns)
    allowed = 2 * tolerances.softmax(V, LARGEST / 0.4)
    expected = logprobs.gather(1, columns)
    tolerances.assert_within(found.logprobs[rows, : 1 + count], expected, allowed)
    ranks = (logits >= logits.gather(1, columns[:, :1])).sum(dim=-1)
    assert found.selected_token_ranks[rows].equal(ranks)


@pytest.mark.numerics
def test_a_step_that_was_taken_back_says_nothing(worker: GetWorker) -> None:
    """Between the step that decided and the commit, too."""
    one = worker(joins_commits=False).admit("a", logprobs=2)
    says = [doubtful(BLOCK, seed) for seed in (1, 2)]
    one.step({"a": says[0]})
    one.step({"a": noise(3)})
    one.step({"a": says[1]})
    one.step({"a": noise(2)})
    found = one.step({"a": noise(C)})
    assert found.emitted == {"a": BLOCK}
    assert_scores(found.logprobs, slice(C), BLOCK, says[1], at_step(2), 2)


@pytest.mark.numerics
def test_in_the_rows_of_those_who_asked(worker: GetWorker) -> None:
    """Side by side with a prefill, one who did not ask, and one with a narrow canvas."""
    one = worker()
    one.admit("prefill", prompt=9, computed=0, logprobs=1)
    one.admit("narrow", diffusion_canvas_length=2, logprobs=1)
    one.admit("plain")
    one.admit("a", logprobs=3)
    says = {
        "prefill": noise(3),
        "narrow": doubtful(BLOCK[:2], 1),
        "plain": doubtful(BLOCK, 2),
        "a": doubtful(BLOCK, 3),
    }
    for _ in range(2):
        found = one.step(says)
    assert found.emitted == {"prefill": [], "narrow": BLOCK[:2], "plain": BLOCK, "a": BLOCK}
    assert found.logprobs is not None and len(found.logprobs.logprobs) == 2 + C
    assert found.logprobs.cu_num_generated_tokens == [0, 0, 0, 2]
    assert_scores(found.logprobs, slice(0, 2), BLOCK[:2], says["narrow"], at_step(2), 1)
    assert_scores(found.logprobs, slice(2, 2 + C), BLOCK, says["a"], at_step(2), 3)
    assert (found.logprobs.logprobs[:2, 2:] == -torch.inf).all(), "nothing else was asked for"


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("mode", "asked", "scale", "biased"),
    [
        ("raw_logprobs", {}, at_step(1, 1), False),
        ("processed_logprobs", {}, at_step(1, 1), True),
        # Of the allowed tokens alone, whatever the mode.
        ("raw_logprobs", {"diffusion_constrained": True}, at_step(1, 1), True),
        # What the model thinks, not what the schedule makes of it.
        ("raw_logprobs", {"diffusion_read_only": True}, 1.0, False),
        ("processed_logprobs", {"diffusion_read_only": True}, 1.0, True),
    ],
)
def test_what_is_asked_for(
    worker: GetWorker, mode: str, asked: dict[str, Any], scale: torch.Tensor | float, biased: bool
) -> None:
    one = worker(logprobs_mode=mode)
    chosen = [30, 31, 32]
    constrained = {"logprob_token_ids": chosen} if "diffusion_constrained" in asked else {}
    bias = {} if constrained else {"logit_bias": {30: 3.0}}
    one.admit("a", logprobs=2, diffusion_max_steps=1, **asked, **constrained, **bias)
    says = doubtful([30] * C, 1)
    found = one.step({"a": says})
    assert found.emitted == {"a": [30] * C} and found.logprobs is not None
    ruled = says.clone()
    if constrained:
        others = torch.ones(V, dtype=torch.bool).index_fill_(0, torch.tensor(chosen), False)
        ruled[:, others] = -1e20
        assert found.logprobs.logprob_token_ids[:, 1:].tolist() == [chosen] * C
    elif biased:
        ruled[:, 30] += 3.0
    expected = (ruled / scale).log_softmax(dim=-1)[:, 30]
    allowed = 2 * tolerances.softmax(V, LARGEST / 0.4)
    tolerances.assert_within(found.logprobs.logprobs[:, 0], expected, allowed)


@pytest.mark.numerics
def test_logits_as_they_are(worker: GetWorker) -> None:
    one = worker(logprobs_mode="raw_logits").admit("a", logprobs=0, diffusion_max_steps=1)
    says = doubtful(BLOCK, 1)
    found = one.step({"a": says}).logprobs
    assert found is not None and found.logprobs.shape == (C, 1)
    expected = says[range(C), BLOCK] / at_step(1, 1)[0]
    tolerances.assert_within(found.logprobs[:, 0], expected, tolerances.SHORT * LARGEST)


@pytest.mark.numerics
def test_first_tokens_that_were_known_before(worker: GetWorker) -> None:
    """Their logits are kept of who asked, replaced where they are new, and gone with the slot."""
    kept = StepLogprobs("raw_logprobs", V, torch.device("cpu"))
    for slot, wants in ((0, 1), (1, None), (2, 1)):
        made = params(logprobs=wants)
        options = load_options(made)
        assert options is not None
        kept.remove_request(slot)
        kept.add_request(NewRequest(slot, made, options, C, C, num_steps=1))
    canvases = canvas_batch(C, [C] * 3)
    first, second = noise(3, 1), noise(3, 2)
    kept.keep_first_logits([0, 1, 2], first, None)
    first_rows = first.clone()
    first.zero_()
    kept.keep_first_logits([0, 1, 2], second, torch.tensor([True, True, False]))
    rows = torch.zeros(3 * C, V)
    kept.restore_first_logits(canvases, rows, torch.tensor([True, True, True]))
    assert rows[0].equal(second[0]) and rows[2 * C].equal(first_rows[2])
    rows[[0, 2 * C]] = 0
    assert not rows.any(), "nothing else has changed"
    kept.restore_first_logits(canvases, rows, torch.tensor([False, True, False]))
    assert not rows.any()
    kept.remove_request(0)
    kept.restore_first_logits(canvases, rows, torch.tensor([True, True, True]))
    assert not rows[0].any() and rows[2 * C].any()
