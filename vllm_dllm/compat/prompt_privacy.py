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


def keep_prompts_private(runner: Any) -> None:
    """`runner`, a model runner that has loaded its model, scores the rows of a prompt and no
    others, and forgets the tokens of requests that leave."""
    if runner.prompt_logprobs_worker is not None:
        tokens = runner.req_states.all_token_ids
        runner.prompt_logprobs_worker = PromptScores(runner.prompt_logprobs_worker, tokens)


class PromptScores:
    """vLLM's `PromptLogprobsWorker`, whose scores end with the prompt. It hears of every request
    that comes and leaves."""

    def __init__(self, stock: Any, all_token_ids: Any) -> None:
        """`all_token_ids`: vLLM's buffer of the tokens of requests by slot."""
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
        input_batch: InputBatch,
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
