"""A worker's log-probabilities: of prompts within a memory budget, and of a request's own prompt
only; and of the tokens that `logprob_token_ids` names, in steps that verify drafts."""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs, compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_dllm.compat.patching import patch

_MOST_COMPILED = 20  # of log-probabilities; vLLM's default limit


def limit_prompt_logprob_rows(num_rows: int) -> None:
    """Makes a worker compute the logits of prompt log-probabilities for `num_rows` rows at a time,
    or for vLLM's own number if that is less. Patches a constant of vLLM's. Repeatable."""
    patch("v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE", lambda stock: min(num_rows, stock))


def restrict_prompt_logprobs(runner: Any) -> None:
    """Makes `runner`, a model runner that has loaded its model, score only rows of a prompt, and
    erase the tokens of finished requests. A request then learns nothing of other prompts
    (`docs/upstream/prompt-logprobs-leak.md`). Does nothing if the runner scores no prompts.

    vLLM's scheduler pads a request that has one token left to compute with drafts, so that all
    requests of a step are equally long. vLLM scores each row of the request as one of its prompt,
    and the tokens of rows beyond the prompt are those of the slot's previous request.
    """
    if runner.prompt_logprobs_worker is not None:
        tokens = runner.req_states.all_token_ids
        runner.prompt_logprobs_worker = PromptOnlyLogprobs(runner.prompt_logprobs_worker, tokens)


@torch.inference_mode()
def compile_prompt_logprobs(runner: Any) -> None:
    """Compiles the kernel that scores prompts, for every number of log-probabilities that a request
    may ask for, up to `_MOST_COMPILED`. `runner` has loaded its model. Does nothing if it scores no
    prompts."""
    if runner.prompt_logprobs_worker is None:
        return
    model = runner.model_config
    hidden = torch.zeros(1, model.get_hidden_size(), dtype=model.dtype, device=runner.device)
    logits = runner.model.compute_logits(hidden)
    # A negative limit of vLLM's is none.
    most = min(model.max_logprobs, _MOST_COMPILED) if model.max_logprobs >= 0 else _MOST_COMPILED
    for number in range(1, most + 2):  # of the token itself, and of the likeliest
        ids = torch.zeros(1, number, dtype=torch.int64, device=runner.device)
        compute_token_logprobs(logits, ids)


class PromptOnlyLogprobs:
    """Wraps vLLM's `PromptLogprobsWorker`. Cuts off scores beyond the prompt, and erases the tokens
    of requests that leave."""

    def __init__(self, stock: Any, all_token_ids: Any) -> None:
        """`stock`: vLLM's `PromptLogprobsWorker`. `all_token_ids`: vLLM's buffer of requests'
        tokens, whose `.gpu` is [max_num_reqs, max_model_len] int32."""
        self._stock, self._all_token_ids = stock, all_token_ids
        self._slots: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def add_request(self, req_id: str, req_idx: int, *args: Any, **kwargs: Any) -> None:
        self._slots[req_id] = req_idx
        self._stock.add_request(req_id, req_idx, *args, **kwargs)

    def remove_request(self, req_id: str) -> None:
        """Forgets a request and zeroes its slot of the tokens, if it was added."""
        if (slot := self._slots.pop(req_id, None)) is not None:
            self._all_token_ids.gpu[slot].zero_()
        self._stock.remove_request(req_id)

    def compute_prompt_logprobs(
        self,
        logits_fn: Any,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        input_batch: Any,  # vLLM's InputBatch
        all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len] int32
        num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32
        prompt_lens: np.ndarray,  # [max_num_reqs], by slot
    ) -> dict[str, LogprobsTensors]:
        """Returns vLLM's scores by request id, without rows beyond the prompt. Leaves out requests
        that have no other rows."""
        found: dict[str, LogprobsTensors] = self._stock.compute_prompt_logprobs(
            logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
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


def score_named_tokens(runner: Any) -> None:
    """Makes `runner`, a model runner that has loaded its model, score the tokens of
    `logprob_token_ids` in every step. vLLM's rejection sampler leaves them out, for all requests of
    a step in which one has a draft. Does nothing if the runner verifies no drafts."""
    if isinstance(runner.rejection_sampler, RejectionSampler):
        runner.rejection_sampler = NamedTokensRejectionSampler(runner)


class NamedTokensRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, which also scores the tokens of `logprob_token_ids`."""

    def __init__(self, runner: Any) -> None:
        stock = runner.rejection_sampler
        super().__init__(
            stock.sampler,
            runner.speculative_config,
            runner.device,
            watermark_key=stock.watermark_key,
        )
        # vLLM's ranks gather as many columns of scores as this says: leaving those of named tokens
        # out was for the stock sampler.
        dims = self.sampler.get_logprobs_dims
        self.sampler.get_logprobs_dims = lambda idx_mapping_np, include_token_ids=True: dims(
            idx_mapping_np
        )

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns vLLM's `SamplerOutput` of a step. `logits`: [num_logits, vocab_size]."""
        state = self.sampler.logprob_token_ids_state
        self._num_named = state.max_num_token_ids(input_batch.idx_mapping_np)
        self._slots = input_batch.expanded_idx_mapping  # [num_logits], not yet scored
        return super().__call__(logits, input_batch, *args, **kwargs)

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,  # [num_reqs, num_speculative_steps + 1]
        num_sampled: torch.Tensor,  # [num_reqs]
        logits: torch.Tensor,  # [num_logits, vocab_size], of the next requests that have no scores
        cu_num_logits: torch.Tensor,  # [num_reqs + 1]
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """Returns vLLM's scores, and those of each request's named tokens if any names some."""
        slots, self._slots = self._slots[: len(logits)], self._slots[len(logits) :]
        arguments = sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np
        if self._num_named == 0:
            return super()._get_logprobs_tensors(*arguments, max_num_logprobs)
        scores = super()._get_logprobs_tensors(*arguments, 0)
        assert scores is not None
        num_generated = scores.cu_num_generated_tokens_tensor
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            scores.logprob_token_ids[:, 0],
            scores.cu_num_generated_tokens if num_generated is None else num_generated,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=self._num_named,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
