"""A request is told of its own prompt alone (`docs/upstream/prompt-logprobs-leak.md`).

vLLM's scheduler pads a request with one token left to compute with drafts, so that all requests of
a step are equally long. Its prompt log-probabilities take every row of the request for one of the
prompt, and read the tokens of the rows behind it where the slot's last request still lies.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch


def keep_prompts_private() -> None:
    """A worker scores the rows of a prompt and no others, and forgets the tokens of requests that
    leave. Repeatable."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker  # this process'
    from vllm.v1.worker.gpu.states import RequestState

    if RequestState.remove_request.__module__ == __name__:
        return
    stock_compute_prompt_logprobs = PromptLogprobsWorker.compute_prompt_logprobs
    stock_remove_request = RequestState.remove_request

    def compute_prompt_logprobs(
        self: PromptLogprobsWorker,
        logits_fn: Any,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,  # [max_num_reqs], by slot
    ) -> dict[str, LogprobsTensors]:
        found = stock_compute_prompt_logprobs(
            self,
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

    def remove_request(self: RequestState, req_id: str) -> int | None:
        slot = stock_remove_request(self, req_id)
        if slot is not None:
            self.all_token_ids.gpu[slot].zero_()
        return slot

    PromptLogprobsWorker.compute_prompt_logprobs = compute_prompt_logprobs
    RequestState.remove_request = remove_request
