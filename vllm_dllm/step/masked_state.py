"""What vLLM's model runner asks of a masked model."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.step.attn_requests import AttnRequests
from vllm_dllm.step.masked_step import MaskedStep
from vllm_dllm.step.model_state import DiffusionModelState
from vllm_dllm.step.seeded_step import CausalStep
from vllm_dllm.step.shifted_step import ShiftedStep


class CausalModelState(DiffusionModelState):
    """Known rows are causal, and a canvas' rows see each other and all known ones."""

    step_cls: type[MaskedStep] = CausalStep

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        self.step.begin(input_batch)
        return {}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}


class MaskedModelState(CausalModelState):
    """All rows follow one rule of visibility: a row sees all blocks up to its own, whether it is a
    prompt's or a canvas'."""

    step_cls = MaskedStep

    def attn_requests(
        self, input_batch: InputBatch, block_tables: Sequence[torch.Tensor]
    ) -> AttnRequests:
        return AttnRequests.whole(input_batch, block_tables)

    def causal(self, requests: AttnRequests, input_batch: InputBatch) -> int:
        return self.step.canvas_length


class ShiftedModelState(MaskedModelState):
    """A row's logits are those of the token after it."""

    step_cls = ShiftedStep
