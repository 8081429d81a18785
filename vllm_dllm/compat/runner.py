"""Model runner v2: what it takes for a prefill, what it loads, and how it scores prompts."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput

from vllm_dllm.compat.patching import replace

if TYPE_CHECKING:  # of workers, and this is loaded by schedulers, too
    from vllm.v1.worker.gpu.input_batch import InputBatch


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


def leave_vocabulary_to_base(runner: Any) -> None:
    """Adapters of a runner that is about to load a target with a drafter change neither embeddings
    nor LM head: vLLM expects one row of logits of a request, and a request whose drafts are
    verified has several. Adapters that do are refused when they are loaded."""
    stock_load_lora_model = runner.load_lora_model

    def load_lora_model(model: torch.nn.Module, *args: Any) -> torch.nn.Module:
        if runner.speculative_config is not None:
            model.embedding_modules = {}
        return stock_load_lora_model(model, *args)

    runner.load_lora_model = load_lora_model


def keep_prompts_private(runner: Any) -> None:
    """`runner`, a model runner that has loaded its model, scores the rows of a prompt and no
    others, and forgets the tokens of requests that leave: a request is told of its own prompt alone
    (`docs/upstream/prompt-logprobs-leak.md`).

    vLLM's scheduler pads a request with one token left to compute with drafts, so that all requests
    of a step are equally long. Its prompt log-probabilities take every row of the request for one
    of the prompt, and read the tokens of the rows behind it where the slot's last request still
    lies.
    """
    if runner.prompt_logprobs_worker is not None:
        tokens = runner.req_states.all_token_ids
        runner.prompt_logprobs_worker = PromptOnlyLogprobs(runner.prompt_logprobs_worker, tokens)


class PromptOnlyLogprobs:
    """vLLM's `PromptLogprobsWorker`, whose scores end with the prompt. It hears of every request
    that comes and leaves."""

    def __init__(self, stock: Any, all_token_ids: Any) -> None:
        """`stock`: vLLM's `PromptLogprobsWorker`. `all_token_ids`: vLLM's buffer of requests'
        tokens, whose `.gpu` is [max_num_reqs, max_model_len] int32; a slot is zeroed when its
        request leaves."""
        self._stock, self._all_token_ids = stock, all_token_ids
        self._slots: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def add_request(self, req_id: str, req_idx: int, *args: Any, **kwargs: Any) -> None:
        self._slots[req_id] = req_idx
        self._stock.add_request(req_id, req_idx, *args, **kwargs)

    def remove_request(self, req_id: str) -> None:
        if (slot := self._slots.pop(req_id, None)) is not None:
            self._all_token_ids.gpu[slot].zero_()
        self._stock.remove_request(req_id)

    def compute_prompt_logprobs(
        self,
        logits_fn: Any,
        hidden_states: torch.Tensor,
        input_batch: "InputBatch",
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,  # [max_num_reqs], by slot
    ) -> dict[str, LogprobsTensors]:
        found: dict[str, LogprobsTensors] = self._stock.compute_prompt_logprobs(
            logits_fn,
            hidden_states,
            input_batch,
            all_token_ids,
            num_computed_tokens,
            prompt_lens,
        )
        if not found:
            return found
        ends = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
        beyond = ends - prompt_lens[input_batch.idx_mapping_np]
        for request_id, num_rows in zip(input_batch.req_ids, beyond.tolist(), strict=True):
            if num_rows > 0 and (scores := found.pop(request_id, None)) is not None:
                kept = len(scores.logprobs) - num_rows
                if kept > 0:
                    found[request_id] = LogprobsTensors(*(rows[:kept] for rows in scores[:3]))
        return found
