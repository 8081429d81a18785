"""vLLM's DFlash drafters, of which no tensor may be missing."""

from collections.abc import Iterable, Iterator

import torch
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.compat.dflash import KeyNormOfEachLayer
from vllm_dllm.quantization.complete_weights import CompleteWeights


class CompleteDrafter(DFlashQwen3ForCausalLM):
    """Goes before vLLM's class of the same layers."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError if a tensor is missing, but for those that targets share."""
        names = WeightsMapper(
            orig_to_new_prefix={"": "model."},
            orig_to_new_substr=self.model.hf_to_vllm_mapper.orig_to_new_substr,
        )
        shared = ("lm_head.", "model.embed_tokens.", "model.mask_embedding", "draft_id_to_")
        complete = CompleteWeights(self, self.packed_modules_mapping, names, optional=shared)

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                complete.count_tensor(names.map_name(name))
                yield name, weight

        super().load_weights(counted())
        complete.check_complete()


class DFlash2DraftModel(CompleteDrafter, DFlash2Qwen3ForCausalLM):
    """vLLM's own."""


class DFlashDraftModel(CompleteDrafter):
    model_cls = KeyNormOfEachLayer
