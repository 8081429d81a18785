"""vLLM's `ModelState` for masked models: one class for each way that their rows see each other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from attention_kernels.masks import block_spans, verifying_spans
from vllm_dllm.compat.gpu import keep_during_sleep
from vllm_dllm.config.architectures import Family
from vllm_dllm.step.masked.drafting_step import CopiedStep, DraftingStep, ShiftedStep
from vllm_dllm.step.masked.first_token_step import VerifiedStep
from vllm_dllm.step.masked.levenshtein_step import LevenshteinStep
from vllm_dllm.step.masked.masked_step import MaskedStep
from vllm_dllm.step.runner.attn_requests import AttnRequests
from vllm_dllm.step.runner.model_state import DiffusionModelState


class CausalModelState(DiffusionModelState):
    """The state of models whose known rows are causal. A canvas' rows see it and all known ones."""

    step_cls: type[MaskedStep] = VerifiedStep

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        self.step.begin_step(input_batch)
        return {}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}


class MaskedModelState(CausalModelState):
    """The state of models in which every row, a prompt's or a canvas', sees all blocks up to its
    own. In this class, candidates may delete and insert tokens."""

    step_cls: type[MaskedStep] = LevenshteinStep
    step: MaskedStep

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._block_spans: torch.Tensor | None = None
        if vllm_config.attention_config.flash_attn_version == 4:
            with keep_during_sleep(self.model_config):  # CUDA graphs read this address
                size = (self.max_num_tokens, 2)
                self._block_spans = torch.zeros(size, dtype=torch.int32, device=device)

    def attn_requests(
        self, input_batch: InputBatch, block_tables: Sequence[torch.Tensor]
    ) -> AttnRequests:
        return AttnRequests.one_per_request(input_batch, block_tables)

    def causal(self, requests: AttnRequests, input_batch: InputBatch) -> torch.Tensor | int:
        """Returns how many tokens a block has, one number for all requests. Returns 1 for
        FlashAttention-4, which reads blocks from `image_spans`."""
        return self.step.block_length if self.by_blocks else 1

    @property
    def by_blocks(self) -> bool:
        return self._block_spans is None

    def image_spans(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode
    ) -> torch.Tensor | None:
        """Returns [num_tokens, 2] int32: the block of each row, as if it were an image.
        FlashAttention-4 reads it, which knows images but no blocks. Returns None for Triton."""
        spans, num_tokens = self._block_spans, input_batch.num_tokens
        if spans is None:
            return None
        positions = input_batch.positions[:num_tokens]
        spans[:num_tokens] = block_spans(positions, self.step.block_length)
        return spans


class DraftingModelState(MaskedModelState):
    """The state of models that verify drafts of requests that ask for it."""

    step_cls: type[DraftingStep] = CopiedStep
    step: DraftingStep

    def causal(self, requests: AttnRequests, input_batch: InputBatch) -> torch.Tensor | int:
        """Returns `causal` of each request, where some requests' drafts may be verified."""
        length = super().causal(requests, input_batch)
        if not self.step.may_verify(input_batch):
            return length
        return torch.where(self.step.verifies(requests.slots), self.step.verifying_causal, length)

    def image_spans(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode
    ) -> torch.Tensor | None:
        """Returns the block of each row, as `MaskedModelState` does. A row of a request whose draft
        this step verifies has the keys that it sees instead."""
        spans = super().image_spans(input_batch, cudagraph_mode)
        if spans is None or not self.step.may_verify(input_batch):
            return spans
        n, num_tokens = input_batch.num_reqs, input_batch.num_tokens
        positions = input_batch.positions[:num_tokens]
        num_rows = input_batch.query_start_loc[: n + 1].diff()
        verifies = self.step.verifies(input_batch.idx_mapping[:n])
        of_requests = torch.stack((input_batch.seq_lens[:n] - num_rows, verifies.int()))
        of_rows = of_requests.repeat_interleave(num_rows, dim=1, output_size=num_tokens)
        if self.step.verifying_causal < 0:
            own = verifying_spans(positions, of_rows[0], self.step.block_length)
        else:
            own = block_spans(positions, 1)
        spans[:num_tokens] = torch.where(of_rows[1, :, None] == 1, own, spans[:num_tokens])
        return spans


class ShiftedModelState(DraftingModelState):
    """The state of models whose rows have the next token's logits."""

    step_cls = ShiftedStep


def state_class(family: Family) -> type[CausalModelState]:
    """Returns the class of model states for a family."""
    if family.is_causal:
        return CausalModelState
    if family.is_shifted:
        return ShiftedModelState
    return MaskedModelState if family.moves_tokens else DraftingModelState
