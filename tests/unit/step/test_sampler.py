"""What the runner gets of a step: a column of each request, whether it has a canvas or not."""

from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_worker import Worker

from tests.unit.step.worker import C, GetWorker, noise, params, sure
from vllm_dllm.step.masked.masked_step import MaskedStep
from vllm_dllm.step.runner.sampler import DiffusionSampler
from vllm_dllm.step.runner.worker import CanvasWorker

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


def test_prefills_alone(worker: GetWorker) -> None:
    one = worker()
    one.admit("a", prompt=9, computed=0)
    one.admit("b", prompt=9, computed=0)
    assert one.step({"a": noise(9), "b": noise(4)})[:2] == ({"a": [], "b": []}, {"a": 0, "b": 0})


def test_what_the_runner_reads(worker: GetWorker) -> None:
    one = worker()
    one.admit("a")
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


def test_a_block_that_is_committed_is_computed_for_good(worker: GetWorker) -> None:
    one = worker(MaskedStep, "SDARForCausalLM", joins_commits=False)
    one.admit("a", prompt=C + 2, computed=C)
    steps = [one.step({"a": sure(BLOCK)})[:2] for _ in range(2)]
    assert steps == [({"a": []}, {"a": C}), ({"a": BLOCK[2:]}, {"a": 0})]


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
    one = worker()
    one.admit("a", carried={"joins_commits": False})
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
