"""vLLM 0.33 sizes a GPU's cache with requests of its own in every slot, which nobody takes out."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from tests.engine.conftest import GetEngine, GetTiny
from tests.engine.one_step import FEW_STEPS, random_ids


@torch.inference_mode()
def warm_up(worker: Any) -> None:
    """What `GPUModelRunner._dummy_sampler_run` of vLLM 0.33 does on GPUs."""
    runner = worker.model_runner
    num_reqs, sampler = runner.max_num_reqs, runner.sampler
    for slot in range(num_reqs):
        sampler.add_request(slot, SamplingParams.for_sampler_warmup())
    sampler.apply_staged_writes()
    logits = torch.zeros(num_reqs, runner.vocab_size)
    output = sampler(logits, InputBatch.make_dummy(num_reqs, num_reqs, runner.input_buffers))
    assert output.num_sampled.tolist() == [0] * num_reqs


def test_leaves_no_trace(engine: GetEngine, tiny: GetTiny) -> None:
    served = engine(tiny(64))

    def answers() -> list[list[int]]:
        params = [
            SamplingParams(
                max_tokens=40, ignore_eos=True, seed=seed, logprobs=1, extra_args=FEW_STEPS
            )
            for seed in range(3)
        ]
        prompts = [{"prompt_token_ids": random_ids(20, 512, seed)} for seed in range(3)]
        outputs = served.llm.generate(prompts, params, use_tqdm=False)
        assert all(len(scores) <= 2 for o in outputs for scores in o.outputs[0].logprobs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    before = answers()
    served.llm.collective_rpc(warm_up)
    assert answers() == before
