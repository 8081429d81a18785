"""Scores of the tokens that `logprob_token_ids` names, in steps that verify drafts."""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


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
