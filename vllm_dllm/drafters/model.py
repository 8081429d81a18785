"""vLLM's DFlash drafter with the keys and values of its context made in one launch.

vLLM makes them in a launch for each norm, rotation and layer's cache; see `context_kv`. Where the
weights are quantised or a backend's cache is laid out differently, this does as vLLM does.
"""

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.platforms import current_platform

from vllm_dllm.compat.dflash import DFlashModelHooks
from vllm_dllm.drafters.context_kv import ContextWeights, DrafterCaches, store_context_kv_

logger = init_logger(__name__)


class FusedContextModel(DFlashModelHooks):
    _found: tuple[ContextWeights, DrafterCaches] | None = None

    def store_context_kv(
        self, states: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> bool:
        if self._found is None:  # the first time that there are caches
            weights, caches = self.context_weights(), self.context_caches()
            if weights is None or caches is None:
                logger.info_once("The drafter's context is stored by vLLM's own operations.")
                return False
            self._found = weights, caches
        is_shared = len({each.data_ptr() for each in slots}) == 1
        store_context_kv_(
            states, positions, slots[0] if is_shared else torch.stack(slots), *self._found
        )
        return True


class DFlashDraftModel(DFlashQwen3ForCausalLM):
    # On CPUs vLLM's own operations are faster than the definition in PyTorch.
    model_cls = FusedContextModel if current_platform.is_cuda() else DFlashModelHooks
