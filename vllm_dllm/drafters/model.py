"""vLLM's models of DFlash drafters, with a check of their weights."""

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.compat.dflash import MendedDFlashModel
from vllm_dllm.quantization.checked_weights import load_checked


class CompleteDrafter(DFlashQwen3ForCausalLM):
    """vLLM's DFlash model, which also refuses incomplete and wrong weights."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads the weights. Raises ValueError, as `load_checked`, also if one is missing that the
        target does not share."""
        renamed = self.model.hf_to_vllm_mapper  # by parts of names, since vLLM 0.33 by patterns
        names = WeightsMapper(
            orig_to_new_prefix={"": "model."},
            orig_to_new_substr=renamed.orig_to_new_substr,
            orig_to_new_regex=renamed.orig_to_new_regex,
        )
        shared = ("lm_head.", "model.embed_tokens.", "model.mask_embedding", "draft_id_to_")
        load_checked(self, super().load_weights, weights, names, shared)


class DFlash2DraftModel(CompleteDrafter, DFlash2Qwen3ForCausalLM):
    """The model of DFlash2 drafters."""


class DFlashDraftModel(CompleteDrafter):
    """The model of DFlash drafters."""

    model_cls = MendedDFlashModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Caps logits if the drafter's config says so: those for Gemma targets do."""
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.logits_processor.soft_cap = getattr(self.config, "final_logit_softcapping", None)
