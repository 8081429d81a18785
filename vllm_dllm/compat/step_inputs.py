"""Model runner v2: what a step's inputs have in common with those of the step before.

A canvas takes many steps, and most steps have the requests, rows and cache blocks of the step
before. vLLM copies their indices to the device anew each time, and gathers their block tables.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    prepare_pos_seq_lens,
)


def reuse_step_inputs(runner: Any) -> None:
    """Makes a diffusion model's `runner` prepare only what has changed since the last step, by
    replacing its `prepare_inputs`, `prepare_attn` and `_dummy_run`. On a GPU this saves seven
    launches a step."""
    _ReusedInputs(runner)


class _ReusedInputs:
    """Prepares the inputs of a runner's steps, and keeps the last step's."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stock_inputs, self._stock_attn = runner.prepare_inputs, runner.prepare_attn
        self._stock_dummy_run = runner._dummy_run
        self._batch: InputBatch | None = None  # the last step's
        self._batch_desc: Any = None  # and the shape that it ran in
        # Its block tables. None: the step that is being prepared must gather them.
        self._block_tables: tuple[torch.Tensor, ...] | None = None
        runner.prepare_inputs, runner.prepare_attn = self.prepare_inputs, self.prepare_attn
        runner._dummy_run = self.dummy_run

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, state: Any, batch_desc: Any, *args: Any
    ) -> InputBatch:
        """Returns the inputs of a step, whose requests are described by `state`."""
        last = self._batch if batch_desc == self._batch_desc and self._is_plain() else None
        if last is None or not _has_same_rows(state, last):
            self._block_tables = None
            self._batch = self._stock_inputs(scheduler_output, state, batch_desc, *args)
            self._batch_desc = batch_desc
            return self._batch
        if _may_hand_out_blocks(scheduler_output):
            self._block_tables = None
        self._batch = self._advance(last, state, scheduler_output.has_structured_output_requests)
        return self._batch

    def _is_plain(self) -> bool:
        """Returns whether the runner has none of the options with which it prepares more."""
        runner = self._runner
        options = (runner.pcp_manager, runner.fast_prefill, runner.adaptive_verification)
        return options == (None, None, None) and runner.model_config.rswa_window is None

    def _advance(self, last: InputBatch, state: Any, has_structured_outputs: bool) -> InputBatch:
        """Returns inputs with the rows of `last`: computes what changes from step to step."""
        runner = self._runner
        states, buffers = runner.req_states, runner.input_buffers
        prepare_pos_seq_lens(
            last.idx_mapping,
            last.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        logits_indices = combine_sampled_and_draft_tokens(
            buffers.input_ids,
            last.idx_mapping,
            states.last_sampled_tokens,
            last.query_start_loc,
            last.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            last.cu_num_logits,
            int(last.cu_num_logits_np[-1]),  # a model's step may have changed `logits_indices`
            runner.model_state.num_new_sampled_tokens_per_step,
        )
        num_computed = states.num_computed_tokens_np[last.idx_mapping_np]
        bounds = np.zeros(last.num_reqs_after_padding, dtype=np.int32)
        bounds[: last.num_reqs] = num_computed + last.num_scheduled_tokens
        return replace(
            last,
            num_computed_tokens_np=num_computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(bounds),
            dcp_local_seq_lens=None,
            prefill_len_np=state.prefill_len_np,
            num_computed_prefill_tokens_np=state.num_computed_prefill_tokens_np,
            is_prefilling_np=state.is_prefilling_np,
            logits_indices=logits_indices,
            has_structured_output_reqs=has_structured_outputs,
        )

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Returns a step's block tables and slot mappings."""
        if self._block_tables is None:
            self._block_tables, slot_mappings = self._stock_attn(input_batch)
            return self._block_tables, slot_mappings
        slot_mappings = self._runner.block_tables.compute_slot_mappings(
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.positions,
            num_tokens_padded=input_batch.num_tokens_after_padding,
        )
        return self._block_tables, slot_mappings

    def dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step without requests, which overwrites the buffers of the last step's inputs."""
        self._batch = None
        return self._stock_dummy_run(*args, **kwargs)


def _may_hand_out_blocks(scheduler_output: SchedulerOutput) -> bool:
    """Returns whether a request may have got cache blocks since the last step.

    Then all tables are gathered anew, not only those of requests that got blocks. The blocks may be
    some that another request lost because its window has passed them, and vLLM 0.33 leaves such
    blocks out of its table. A KV connector loads into blocks of requests that still wait.
    """
    cached = scheduler_output.scheduled_cached_reqs
    return (
        bool(scheduler_output.scheduled_new_reqs)
        or any(ids is not None for ids in cached.new_block_ids)
        or scheduler_output.kv_connector_metadata is not None
    )


def _has_same_rows(state: Any, last: InputBatch) -> bool:
    """Returns whether the requests that `state` describes are those of `last`, with as many rows,
    and all of them have canvases and nothing to prefill."""
    if state.num_draft_tokens_np is None or state.has_prefill or last.has_prefill:
        return False
    return (
        state.req_ids == last.req_ids
        and np.array_equal(state.idx_mapping_np, last.idx_mapping_np)
        and np.array_equal(state.num_scheduled_tokens, last.num_scheduled_tokens)
        and np.array_equal(state.num_draft_tokens_np, last.num_draft_tokens_per_req)
    )
