"""Nemotron-Labs-Diffusion for vLLM: the layers of Ministral 3, which vLLM has as Mistral's."""

from collections.abc import Iterable

import torch
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_dllm.models.masked import MaskedModel

_NAMES = WeightsMapper(orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."})
"""Maps the checkpoints' names to those of vLLM's class."""


class NemotronLabsDiffusionModel(MaskedModel, MistralForCausalLM):
    """The model that checkpoints call by this name in their own
    modeling_nemotron_labs_diffusion.py. Causal rows, such as a prompt's, have the next token's
    logits."""

    names = _NAMES
    hf_to_vllm_mapper = MistralForCausalLM.hf_to_vllm_mapper | _NAMES  # of quantised layers, too

    def load_named_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        # Not Mistral's own, which expects the names and the rotations of its consolidated files.
        return AutoWeightsLoader(self).load_weights(weights)
