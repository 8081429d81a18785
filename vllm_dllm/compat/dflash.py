"""vLLM's DFlash speculators and drafter model, open to subclasses. Only workers import this."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model, _dflash_layer_causal
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.compat import version
from vllm_dllm.compat.gpu import keep_during_sleep


def has_causal_layers(config: Any) -> bool:
    """Whether rows of a block see no rows behind them in some layers of a drafter. `config`: its
    configuration."""
    return any(_dflash_layer_causal(config, layer) for layer in range(config.num_hidden_layers))


class FiniteStatesSpeculator(DFlashSpeculator):
    """Replaces non-finite hidden states of the drafter by 0. Drafts drawn from them would end a
    worker on CPUs, and be token ids outside the vocabulary on GPUs."""

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Returns the drafter. If the server may sleep, first joins the weights of the context's
        keys and values once more, in memory that a sleep keeps. The joined ones are no parameters,
        so nothing would restore them."""
        drafter = super().load_draft_model(target_model, target_attn_layer_names)
        if (model_config := self.vllm_config.model_config).enable_cumem_allocator:
            with keep_during_sleep(model_config):
                drafter.model._build_fused_kv_buffers()
        return drafter

    def _run_model(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._run_model(*args, **kwargs).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class DFlash2Hooks(FiniteStatesSpeculator, DFlash2Speculator):
    """vLLM's DFlash2 speculator, with finite hidden states and scores of candidates."""

    def _score_candidates(
        self, candidate_ids: torch.Tensor, unary_logits: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Returns vLLM's scores of candidates, with 0 for those that are not finite."""
        scores = super()._score_candidates(candidate_ids, unary_logits, hidden_states)
        return scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class DFlashHooks(FiniteStatesSpeculator):
    """vLLM's DFlash speculator, with some of its steps open to subclasses."""

    req_states: RequestState  # the runner's, which the subclass is given

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Returns the drafter. One without embeddings of its own shares the target's table, and
        scales them as Gemma targets do."""
        drafter = super().load_draft_model(target_model, target_attn_layer_names)
        if not getattr(drafter, "has_own_embed_tokens", False):
            find_language_model = getattr(target_model, "get_language_model", lambda: target_model)
            target = getattr(find_language_model(), "model", None)
            drafter.model.embedding_scale = float(getattr(target, "normalizer", 1.0))
        return drafter

    def blocks_prepared(self) -> None:
        """Hook that does nothing here. Called when the inputs of the step's draft blocks are in the
        buffers. May change them on the device; becomes part of the captured CUDA graph."""

    def gather_context(
        self,
        input_batch: InputBatch,
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size] of the target
        aux_hidden_states: list[torch.Tensor] | None,
        tokens: torch.Tensor | None = None,  # [n] int64 of the batch; None: all
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Returns what the target has just computed for `tokens`: hidden states [n, hidden_size] of
        each layer that the drafter reads, positions [n], and slots [num_groups, n] in the KV cache.
        Does not wait for the device.

        `aux_hidden_states`: states [num_tokens, hidden_size] of the layers that the drafter reads;
        None: it reads `last_hidden_states`.
        """
        chosen = slice(input_batch.num_tokens) if tokens is None else tokens
        # The target's own slots of this step: drafting has not yet put a block's in their place.
        mappings, group_ids = self.block_tables.slot_mappings, self.draft_kv_cache_group_ids
        slots = torch.stack([mappings[gid, chosen] for gid in group_ids])
        states = [states[chosen] for states in aux_hidden_states or [last_hidden_states]]
        return states, input_batch.positions[chosen], slots

    def store_context(
        self,
        states: torch.Tensor,  # [n, num_layers * hidden_size]
        positions: torch.Tensor,  # [n] int64
        slots: torch.Tensor,  # [num_groups, n] int64
    ) -> None:
        """Writes the drafter's keys and values of n tokens to its KV cache, without preparing a
        draft. Keys and values of refused drafts are overwritten later."""
        of_layers = self._layer_group_idx or [0] * len(self.model.model.layers)
        self.model.precompute_and_store_context_kv(
            self.model.combine_hidden_states(states), positions, [slots[i] for i in of_layers]
        )

    @property
    def cache_is_windowed(self) -> bool:
        """Whether some of the drafter's layers have a sliding window, so that vLLM may give cache
        blocks of a running request to others."""
        groups = self.kv_cache_config.kv_cache_groups
        return any(
            getattr(groups[gid].kv_cache_spec, "sliding_window", None) is not None
            for gid in self.draft_kv_cache_group_ids
        )

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        """Calls `blocks_prepared` after vLLM's own work, once a step."""
        super()._precompute_context_kv(start, end, dummy_run)
        if start == 0:  # else a part too long for the graph, which is replayed next
            self.blocks_prepared()

    def propose_for_requests(
        self,
        rows: np.ndarray,  # [n] int, requests of the batch
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size] of the target
        aux_hidden_states: list[torch.Tensor] | None,  # of each layer it reads
        num_sampled: torch.Tensor,  # [num_reqs] int32
        num_rejected: torch.Tensor,  # [num_reqs] int32
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns drafts [n, num_speculative_tokens] for the requests `rows` of a batch, whose
        context must be stored, as if each had just computed its last valid token and nothing else.
        Overwrites the gathered block tables of the step. Other arguments are those of vLLM's
        `propose`."""
        num_reqs = len(rows)
        chosen = async_tensor_h2d(rows, device=self.device, dtype=torch.int64)
        last = input_batch.query_start_loc[chosen + 1].long() - 1 - num_rejected[chosen]
        last_tokens = replace(
            input_batch,
            req_ids=[input_batch.req_ids[row] for row in rows],
            num_reqs=num_reqs,
            num_tokens=num_reqs,
            idx_mapping=input_batch.idx_mapping[chosen],
            idx_mapping_np=input_batch.idx_mapping_np[rows],
            num_scheduled_tokens=np.ones(num_reqs, dtype=np.int32),
            query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=self.device),
            positions=input_batch.positions[last],
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound[rows],
        )
        computed = {}
        if version.is_at_least("0.33"):
            # Without blocks that a window has passed: what others wrote there may read as NaN.
            computed["num_computed_tokens"] = self.req_states.num_computed_tokens.gpu
        self.block_tables.gather_block_tables(
            last_tokens.idx_mapping, num_reqs_padded=num_reqs, **computed
        )
        if (watermarker := getattr(self, "draft_watermarker", None)) is not None:  # vLLM 0.33
            # By row of the whole batch. Rows only move forwards.
            for column in (watermarker.state.contexts, watermarker.state.enabled):
                column[:num_reqs] = column[chosen]
        return super().propose(
            last_tokens,
            attn_metadata,
            slot_mappings,
            last_hidden_states[last],
            [states[last] for states in aux_hidden_states] if aux_hidden_states else None,
            num_sampled[chosen],
            torch.zeros_like(num_rejected[chosen]),
            *args,
            **kwargs,
        )

    def generate_draft(
        self, num_reqs: int, forward: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Hook. Returns drafts [num_reqs, num_speculative_tokens] for the prepared blocks. Here
        returns None, which has vLLM draw them. `forward` computes the blocks' hidden states
        [num_tokens, hidden_size]."""
        return None

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """Writes the drafts of `generate_draft` to `draft_tokens`, or has vLLM draw them."""
        drafts = self.generate_draft(num_reqs, partial(self._run_model, *args, **kwargs))
        if drafts is None:
            super()._generate_draft(num_reqs, *args, **kwargs)
        else:
            self.draft_tokens[:num_reqs] = drafts


class MendedDFlashModel(DFlashQwen3Model):
    """vLLM's DFlash model, with embeddings scaled as the target's are. On CPUs it has the right
    norm of context keys, and takes dummy weights."""

    _fused_kv_weight: torch.Tensor | None
    embedding_scale = 1.0

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the scaled embeddings [num_tokens, hidden_size] of tokens [num_tokens]."""
        return super().embed_input_ids(input_ids) * self.embedding_scale

    def _build_context_kv_buffers(self, *args: Any, **kwargs: Any) -> None:
        """Keeps weights of the context's keys and values, in place. With `--load-format dummy` vLLM
        does so at the first forward, when CPU kernels have packed the weights and left them empty:
        then each layer is computed by itself, as quantised ones are."""
        super()._build_context_kv_buffers(*args, **kwargs)
        if self._fused_kv_weight is not None and self._fused_kv_weight.numel() == 0:
            self._fused_kv_weight = None

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Returns the normed keys [L, num_tokens, num_kv_heads, head_size] of all L layers. vLLM's
        CPU kernel norms every layer's keys with the first layer's weight. Its GPU kernels take a
        weight for each layer, and are used as they are."""
        if all_k.device.type != "cpu":
            return super()._normalize_context_k(all_k)
        normed = torch.empty_like(all_k)
        for out, keys, weight in zip(normed, all_k, self._k_norm_weights, strict=True):
            _custom_ops.rms_norm(out, keys, weight, self._rms_norm_eps)
        return normed
