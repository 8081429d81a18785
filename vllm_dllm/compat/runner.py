"""Model runner v2: what it takes for a prefill, and how it scores prompts."""

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_dllm.compat.patching import replace


@torch.inference_mode()
def join_commits(runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Makes all tokens that the scheduler knows of their requests' prefill, emitted ones too: those
    that are not computed yet are read from the request, like a prompt. For a worker that is about
    to run `scheduler_output`, and schedulers that do not run ahead of the tokens."""
    cached = scheduler_output.scheduled_cached_reqs
    if cached.req_ids and getattr(runner.sampler, "joins_commits", False):
        states = runner.req_states
        slots = [states.req_id_to_index[req_id] for req_id in cached.req_ids]
        prompts = states.prompt_len.np[slots]
        states.prefill_len.np[slots] = prompts + np.array(cached.num_output_tokens)
        states.prefill_len.copy_to_uva()


def send_numbers(runner: Any, output: Any) -> Any:
    """`output` of a worker's step, and with it the numbers that the sampler has of that step, if it
    counts. They may still be on their way from the device, ahead of the tokens."""
    take_numbers = getattr(runner.sampler, "take_numbers", None)
    if take_numbers is not None and isinstance(output, AsyncModelRunnerOutput):
        output.model_runner_output.canvas_numbers = take_numbers()
    return output


def numbers_of(output: ModelRunnerOutput) -> Any:
    """What `send_numbers` sent with it, if it did."""
    return getattr(output, "canvas_numbers", None)


def score_prompts_by(num_rows: int) -> None:
    """A worker's prompt log-probabilities are made of the logits of so many rows at a time, or of
    vLLM's own number if that is less. Repeatable."""
    replace("v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE", lambda stock: min(num_rows, stock))
