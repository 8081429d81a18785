"""vLLM's DFlash drafter, with the keys and values of its context computed in one launch.

vLLM takes a launch for each norm, rotation and layer's cache; see `context_kv`. If the weights are
quantised or a backend lays out its cache differently, vLLM's own operations are used.
"""

from collections.abc import Iterable, Iterator

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from vllm_dllm.compat.dflash import DFlashModelHooks
from vllm_dllm.drafters.context import ContextWeights, DrafterCaches
from vllm_dllm.drafters.context_kv import store_context_kv_
from vllm_dllm.quantization.complete_weights import CompleteWeights

logger = init_logger(__name__)


class FusedContextModel(DFlashModelHooks):
    """Keeps no cache alive: vLLM drops the first ones after it has profiled the memory that CUDA
    graphs take, and allocates new ones when a server wakes up."""

    _addresses: tuple[int, ...] = ()  # of the caches that the next two describe
    _address_table: torch.Tensor  # [num_layers, 2] int64
    _scales: torch.Tensor  # [num_layers, 2] fp32

    def store_context_kv(
        self, states: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> bool:
        weights, found = self.context_weights(), self.context_caches()
        if weights is None or found is None:
            logger.info_once("The drafter's context is stored by vLLM's own operations.")
            return False
        if (addresses := self.cache_addresses()) != self._addresses:
            made = DrafterCaches.of(found.keys, found.values, self.layer_scales())
            self._address_table, self._scales = made.addresses, made.scales
            self._addresses = addresses
        caches = DrafterCaches(found.keys, found.values, self._scales, self._address_table)
        is_shared = len({each.data_ptr() for each in slots}) == 1
        store_context_kv_(
            states,
            positions,
            slots[0] if is_shared else torch.stack(slots),
            ContextWeights(**weights),
            caches,
        )
        return True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self._addresses = ()  # the caches' scales may have changed
        return super().load_weights(weights)


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
                complete.count(names.map_name(name))
                yield name, weight

        super().load_weights(counted())
        complete.check_complete()


class DFlash2DraftModel(CompleteDrafter, DFlash2Qwen3ForCausalLM):
    """vLLM's own."""


class DFlashDraftModel(CompleteDrafter):
    # On CPUs vLLM's own operations are faster than the definition in PyTorch.
    model_cls = FusedContextModel if current_platform.is_cuda() else DFlashModelHooks
