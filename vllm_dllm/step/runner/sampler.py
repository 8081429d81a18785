"""The sampler of vLLM's model runner, which has `CanvasStep` advance canvases."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.compat.worker_logprobs import limit_prompt_logprob_rows
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits.canvas_logits import most_step_bytes, rows_within_budget


class DiffusionSampler:
    """Replaces vLLM's Sampler and RejectionSampler: has `CanvasStep` advance canvases."""

    # The runner reads `output_bin_counts`; None: `LogitFilters` counts, where requests ask for it.
    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(self, step: CanvasStep, max_rows: int) -> None:
        """`max_rows`: canvas rows of the largest step. Also limits how many rows of prompt
        log-probabilities vLLM computes at a time."""
        self.step = step
        self.req_states = step.requests.req_states
        self.sampling_states = step.requests.sampling_states
        self._max_rows = max_rows
        self._replacement: SamplingParams | None = None
        limit_prompt_logprob_rows(rows_within_budget(step.vocab_size, step.memory.budget_bytes))

    @property
    def joins_commits(self) -> bool:
        """Returns whether the step that begins a request's next canvas also commits the block
        before it (`spared_forwards.joins_commits`), as the scheduler said with the latest request.
        False before the first one. Our workers read it of vLLM's runner
        (`compat.runner.join_commits`)."""
        return self.step.requests.joins_commits

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Stages a request for `apply_staged_writes`, with the parameters of `replace_params` if it
        is active."""
        self.step.requests.add_request(req_idx, self._replacement or sampling_params)

    @contextmanager
    def replace_params(self, params: SamplingParams) -> Iterator[None]:
        """Requests that are added in this context get `params` in place of their own."""
        self._replacement = params
        try:
            yield
        finally:
            self._replacement = None

    @cached_property
    def _most_bytes(self) -> int:
        """Returns the most bytes that a step may take for logits and what is made of them."""
        step = self.step
        return most_step_bytes(step.model, step.dtype, self._max_rows, step.memory.budget_bytes)

    def take_numbers(self) -> CanvasNumbers | None:
        """Returns the latest step's numbers, with the memory of its logits, and forgets them.
        Returns None if nobody counts or the step had no canvas."""
        numbers = self.step.take_numbers()
        if numbers is None:
            return None
        return numbers._replace(
            sampling_peak_bytes=self.step.memory.peak_bytes, sampling_bound_bytes=self._most_bytes
        )

    def apply_staged_writes(self) -> None:
        """Writes the slots of requests added since the last step."""
        self.step.requests.apply_staged_writes()

    def __call__(
        self,
        logits: torch.Tensor,  # [rows, V] fp32, soft-capped; of a large vocabulary hidden states
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Advances every canvas of the batch by one step, and returns the emitted tokens of each
        request. Ignores `draft_logits`."""
        step, num_reqs, device = self.step, input_batch.num_reqs, logits.device
        if input_batch.num_draft_tokens_per_req is None:  # vLLM's dummy, which measures memory
            torch.empty(self._most_bytes, dtype=torch.uint8, device=device)
        batch = step.take_batch()
        step.start_canvases(batch, logits, input_batch)
        recomputed = step.num_recomputed(batch, input_batch)
        if batch is None:
            none = torch.zeros(num_reqs, dtype=torch.int32, device=device)
            rejected = none if recomputed is None else recomputed
            return _make_output(none[:, None].expand(-1, step.canvas_length), none, rejected, None)
        result = step.advance(batch, logits, input_batch)
        rejected = result.rejected

        def spread(column: torch.Tensor) -> torch.Tensor:
            """Returns [num_reqs, ...]: 0 for requests without a canvas, which sample nothing."""
            if batch.num_canvases == num_reqs:
                return column
            everyone = column.new_zeros(num_reqs, *column.shape[1:])
            return everyone.index_copy_(0, batch.requests, column)

        if recomputed is not None and rejected is not batch.lengths:
            # Blocks that are committed are computed for good, all of them.
            recomputed = recomputed.masked_fill(spread(rejected == 0), 0)
        rejected = spread(rejected)
        if recomputed is not None:
            rejected = rejected + recomputed
        if batch.behind is not None:
            rejected = rejected + spread(batch.behind)
        return _make_output(
            spread(result.best_guess), spread(result.emitted), rejected, result.logprobs
        )


def _make_output(
    sampled: torch.Tensor,  # [num_reqs, C] int
    num_sampled: torch.Tensor,  # [num_reqs] int
    num_rejected: torch.Tensor,  # [num_reqs] int
    logprobs: LogprobsTensors | None,
) -> SamplerOutput:
    """Returns the runner's output, with the dtypes that it expects."""
    return SamplerOutput(
        sampled_token_ids=sampled.int(),
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=num_sampled.int(),
        num_rejected=num_rejected.int(),
    )
