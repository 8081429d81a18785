"""vLLM's DFlash speculator with a draft width for each request, which the scheduler chooses.

A step's draft is one forward of the drafter over a block per request: the token sampled last (the
anchor) and mask tokens. Keys and values of earlier tokens are computed from the target's hidden
states, also for requests without drafts, so that drafting can resume at any time. That is done in
bulk, and only up to the longest context that is drafted for.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.compat.dflash import DFlash2Hooks, DFlashHooks, has_causal_layers
from vllm_dllm.config.drafter import context_limit
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.drafters.blockpilot import BlockPilot, PredictedWidths, load_predictor
from vllm_dllm.drafters.context import PendingContext
from vllm_dllm.drafters.layout import check_served_drafter, extend_positions, set_draft_window
from vllm_dllm.drafters.passes import choose_revealed, reveal_counts

# Keys of the config of a DFlash2 drafter alone.
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
PENDING_TOKENS = 256  # context that may wait for a draft, see `PendingContext`


class WidthDFlashSpeculator(DFlashHooks):
    """The speculator of a DFlash drafter. Raises ValueError if drafter or settings do not fit."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        """Checks drafter and settings, gives the drafter's configuration the server's positions and
        window, in place, and loads the predictor of widths if there is one. `req_states`: the
        runner's tokens of all requests."""
        config = ExtensionConfig.from_additional_config(vllm_config.additional_config).drafter
        draft, target = vllm_config.speculative_config.draft_model_config, vllm_config.model_config
        layout = check_served_drafter(vllm_config)
        extend_positions(vllm_config)
        if config.narrow_draft:
            check_narrow_draft(draft)
        if config.draft_window is not None:
            set_draft_window(draft, config.draft_window)
        super().__init__(vllm_config, device)
        self._predictor: BlockPilot | None = None
        if config.predictor is not None:
            self._predictor = load_predictor(
                Path(config.predictor),
                vocab_size=target.get_vocab_size(),
                trained_block_size=layout.block_size or self.num_speculative_steps + 1,
                device=device,
            )
        self._predicted: Mapping[str, int] = {}
        self._reveal_counts = reveal_counts(
            self.num_speculative_steps, config.draft_steps, config.schedule
        )
        if config.draft_steps > 1 and self.draft_logits is not None:
            raise ValueError(
                "drafter.draft_steps > 1 drafts best guesses: draft_sample_method of "
                "--speculative-config must be 'greedy', got 'probabilistic'."
            )
        self._narrows = config.narrow_draft
        # With a KV connector, others may read the cache at any time.
        connected = vllm_config.kv_transfer_config is not None
        self._pending = PendingContext(capacity=0 if connected else PENDING_TOKENS)
        # The most tokens of a request whose context is stored, with room for rejected drafts.
        limit = context_limit(config, vllm_config.speculative_config, target.max_model_len)
        self._num_context = limit + self.num_speculative_steps + 1
        # [max_num_reqs] int32, read by the captured graph: tokens to draft for each request.
        self._block_widths = torch.full(
            (self.max_num_reqs,), self.num_speculative_steps, dtype=torch.int32, device=device
        )
        self._widths: dict[str, int] = {}
        self.req_states = req_states
        self._stop_tokens: dict[str, set[int]] = {}

    @torch.inference_mode()
    def step_begins(self, output: SchedulerOutput, widths: dict[str, int]) -> None:
        """Prepares for the step that `output` schedules. `widths` has the tokens to draft after the
        step for each of its requests, 0 for none."""
        # Cache blocks change hands, or are found by other requests, only when requests change.
        arrived = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        if arrived or widths.keys() != self._widths.keys():
            self._store_pending()
        self._widths = widths
        for request in output.scheduled_new_reqs:
            if (params := request.sampling_params) is not None:
                stop_tokens = params.stop_token_ids or []
                if not params.ignore_eos:
                    stop_tokens = params.all_stop_token_ids
                self._stop_tokens[request.req_id] = set(stop_tokens)
        for request_id in output.finished_req_ids:
            self._stop_tokens.pop(request_id, None)

    def load_model(self, target_model: nn.Module) -> None:
        """Loads the drafter, and keeps the target, whose logits the predictor reads."""
        super().load_model(target_model)
        self._target = target_model

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size] of the target
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,  # [num_reqs] int32
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns the drafts [num_reqs, num_speculative_tokens] int64. The arguments are vLLM's.
        Rows of requests without a draft have undefined values."""
        inputs = (attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled)
        if self._predictor is not None and not dummy_run:
            self._predict_widths(input_batch, last_hidden_states)
        # Ranks of data parallelism draft together.
        if dummy_run or self.dp_size > 1:
            return super().propose(input_batch, *inputs, *args, dummy_run=dummy_run, **kwargs)
        # A custom scheduler sends no widths: then all drafts are as wide as possible.
        widest = self.num_speculative_steps
        widths = np.array([self._widths.get(name, widest) for name in input_batch.req_ids])
        are_drafted = widths > 0
        if are_drafted.any():
            are_drafted &= ~self._have_stopped(input_batch, num_sampled)
        (rows,) = np.nonzero(are_drafted)
        if self._narrows:
            async_tensor_h2d(widths[rows], out=self._block_widths[: len(rows)], dtype=torch.int32)
        if len(rows) == input_batch.num_reqs:
            self._store_pending()
            return super().propose(input_batch, *inputs, *args, **kwargs)
        self._store_or_keep_context(
            input_batch, last_hidden_states, aux_hidden_states, len(rows) > 0
        )
        drafts = torch.zeros_like(self.draft_tokens[: input_batch.num_reqs])
        if len(rows) > 0:
            chosen = async_tensor_h2d(rows, device=self.device, dtype=torch.int64)
            drafts[chosen] = self.propose_for_requests(rows, input_batch, *inputs, *args, **kwargs)
        return drafts

    def _store_or_keep_context(
        self,
        input_batch: InputBatch,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        drafts_follow: bool,
    ) -> None:
        """Stores the context of this step's tokens in the KV cache, or keeps it until a draft needs
        it. Skips tokens beyond the longest context that is drafted for. Stores all earlier ones,
        since another request may find them in the prefix cache."""
        counts = input_batch.num_scheduled_tokens
        stored = np.clip(self._num_context - input_batch.num_computed_tokens_np, 0, counts)
        if not stored.any():
            return
        chosen = None
        if (stored < counts).any():
            starts = input_batch.query_start_loc_np[: input_batch.num_reqs]
            offsets = np.arange(counts.sum()) - np.repeat(starts, counts)
            (tokens,) = np.nonzero(offsets < np.repeat(stored, counts))
            chosen = async_tensor_h2d(tokens, device=self.device, dtype=torch.int64)
        states, positions, slots = self.gather_context(
            input_batch, last_hidden_states, aux_hidden_states, chosen
        )
        # Positions of rejected drafts come again and replace these: never store both at once.
        has_drafts = input_batch.num_draft_tokens > 0
        has_room = len(positions) <= self._pending.room
        if drafts_follow or has_drafts or not has_room or self.cache_is_windowed:
            self._store_pending()
            self.store_context(torch.cat(states, dim=-1), positions, slots)
        else:
            self._pending.append(states, positions, slots)

    def _store_pending(self) -> None:
        """Computes the keys and values of the context that was kept, into the KV cache."""
        if (context := self._pending.pop_all()) is not None:
            self.store_context(context.states, context.positions, context.slots)

    def _have_stopped(self, input_batch: InputBatch, num_sampled: torch.Tensor) -> np.ndarray:
        """Returns [num_reqs] bool: requests that a stop token of this step has ended. On a GPU all
        are False, since the host would have to wait for the tokens."""
        ended = np.zeros(input_batch.num_reqs, dtype=bool)
        if self.device.type != "cpu":
            return ended
        tokens = self.req_states.all_token_ids.gpu.numpy()
        totals = self.req_states.total_len.gpu.numpy()
        counts = num_sampled.tolist()
        for row, (name, slot) in enumerate(
            zip(input_batch.req_ids, input_batch.idx_mapping_np.tolist(), strict=True)
        ):
            total = totals[slot]
            gained = tokens[slot, total - counts[row] : total].tolist()
            ended[row] = not self._stop_tokens.get(name, set()).isdisjoint(gained)
        return ended

    def generate_draft(
        self, num_reqs: int, forward: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Drafts in several forwards, each of which reveals the most confident positions. Returns
        the drafts [num_reqs, num_speculative_tokens] int32; None for the usual single forward."""
        if len(self._reveal_counts) == 1:
            return None
        width = self.num_speculative_steps
        blocks = self.input_buffers.input_ids[: num_reqs * self.num_query_per_req]
        drafts = blocks.view(num_reqs, self.num_query_per_req)[:, 1:]  # after the anchors
        masked = torch.ones_like(drafts, dtype=torch.bool)
        for count in self._reveal_counts:
            hidden = forward()[self.sample_indices[: num_reqs * width]]
            logits = self.compute_draft_logits(hidden, 0).float()
            best, tokens = logits.max(dim=-1)
            confidence = (best - logits.logsumexp(dim=-1)).view(num_reqs, width)
            revealed = choose_revealed(confidence, masked, count)
            drafts.copy_(torch.where(revealed, tokens.view(num_reqs, width).int(), drafts))
            masked &= ~revealed
        return drafts

    def _predict_widths(self, input_batch: InputBatch, hidden_states: torch.Tensor) -> None:
        """Predicts the widths of requests whose prefill ends with this step, without waiting."""
        assert self._predictor is not None
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        prefilled = input_batch.is_prefilling_np & (ends >= input_batch.prefill_len_np)
        (rows,) = np.nonzero(prefilled)
        if len(rows) == 0:
            return
        last_tokens = input_batch.query_start_loc_np[rows + 1] - 1
        indices = async_tensor_h2d(last_tokens, device=self.device, dtype=torch.int64)
        logits = self._target.compute_logits(hidden_states[indices])
        self._predicted = PredictedWidths(
            [input_batch.req_ids[row] for row in rows], self._predictor.predict_widths(logits)
        )

    def take_predicted_widths(self) -> Mapping[str, int]:
        """Returns the widths that the last step predicted, by request id, and forgets them."""
        predicted, self._predicted = self._predicted, {}
        return predicted

    def blocks_prepared(self) -> None:
        """Narrows the blocks in the buffers to the widths of their requests."""
        if self._narrows:
            narrow_blocks(
                self.input_buffers.seq_lens, self._block_widths, self.num_speculative_steps
            )


class CheckedDFlash2Speculator(DFlash2Hooks):
    """vLLM's DFlash2 speculator. Raises InputError if the drafter's config is not complete or
    does not fit the target."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_served_drafter(vllm_config, DFLASH2_KEYS)
        extend_positions(vllm_config)
        super().__init__(vllm_config, device)


def check_narrow_draft(draft_model_config: Any) -> None:
    """Raises ValueError if the drafter has causal layers. There, a block's rows are counted from
    the end, which `narrow_blocks` moves: the first ones would not see the latest tokens."""
    if has_causal_layers(draft_model_config.hf_config):
        raise ValueError(
            f"drafter.narrow_draft is not possible with the drafter {draft_model_config.model}, "
            f"which has causal layers: their rows would not see the latest tokens. Leave it out."
        )


def narrow_blocks(
    seq_lens: torch.Tensor,  # [R] int32 of context and block, changed in place; 0 = no request
    widths: torch.Tensor,  # [R] int32, tokens to draft, at least 1
    num_drafted: int,  # tokens that every block has rows for
) -> None:
    """Hides the mask tokens beyond `widths` from the other rows of their block. Their own rows are
    still computed, so that all requests have the same number of rows; their drafts are not used.
    Attention needs at least as many keys as rows, so a block stays wider if its context is shorter
    than the mask tokens to hide."""
    narrower = (seq_lens - (num_drafted - widths)).clamp_(min=num_drafted + 1)
    torch.minimum(narrower, seq_lens, out=seq_lens)
