"""Runs FlashAttention-4 in our layers, in one of two ways.

By flags: without a window, a request is causal or not, and on Hopper vLLM's copy of
FlashAttention-4 takes a flag for each request.

By masks: the batch is cut into chunks of queries, with our mask function (`fa4_fwd`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from attention_kernels.batch import Batch
from attention_kernels.support import FA4_HEAD_SIZES, FP8, Case, fa4_reason
from vllm_dllm.attention.choice import LayerKind
from vllm_dllm.compat.attention import flash_attention_4

if TYPE_CHECKING:
    from vllm_dllm.attention.gpu import GpuCanvasMetadata

_BY_FLAGS = (*FA4_HEAD_SIZES[9], 512)  # head sizes on Hopper; 512 in vLLM's copy alone
_CACHE_DTYPES = {  # others mean the model's
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": FP8,
    "fp8_e4m3": FP8,
}


@dataclass(frozen=True)
class FlashAttention:
    """FlashAttention-4 for one kind of layer."""

    forward: Callable[..., Any]  # see `fa4_fwd.Forward`
    has_flags: bool  # whether it can take a causal flag for each request
    has_masks: bool  # whether it can take our mask function

    @classmethod
    def find(
        cls, layer: LayerKind, dtype: torch.dtype, kv_cache_dtype: str
    ) -> "FlashAttention | str":
        """Returns FlashAttention-4 for a kind of layer on this GPU, or the reason why it cannot
        run, in words that follow "because". `dtype`: the query's. `kv_cache_dtype`: vLLM's name of
        the cache's."""
        capability = current_platform.get_device_capability()
        case = Case(
            capability=(capability.major, capability.minor),
            head_size=layer.head_size,
            query_dtype=dtype,
            cache_dtype=_CACHE_DTYPES.get(kv_cache_dtype, dtype),
        )
        has_flags = capability.major == 9 and not layer.has_window and layer.head_size in _BY_FLAGS
        has_masks = (reason := fa4_reason(case)) is None
        if has_flags:  # only the head size may be in the way of masks
            reason = fa4_reason(case._replace(head_size=FA4_HEAD_SIZES[9][0]))
        if reason is not None:
            return f"it takes {reason}"
        try:
            import attention_kernels.fa4_fwd  # noqa: F401

            return cls(flash_attention_4(), has_flags, has_masks)
        except ImportError as error:
            return f"it is not there: {error}"

    def uses_flags(self, has_images: bool) -> bool:
        """Returns whether it runs by flags, which allow no images, in a step with or without
        them."""
        return self.has_flags and not has_images

    def can_run(self, has_images: bool, by_blocks: bool) -> bool:
        """Returns whether it can run a step, by flags or by masks. Neither allow requests that are
        causal by blocks."""
        return (self.uses_flags(has_images) or self.has_masks) and not by_blocks

    def attend(
        self,
        batch: Batch,
        metadata: "GpuCanvasMetadata",  # of the batch
        *,
        output: torch.Tensor,  # [T, Hq, D]
        scale: float,
        window_left: int,
        softcap: float,
    ) -> None:
        """Writes attention's result to `output`, by flags where they suffice, else by masks. Keeps
        the chunks of masks in `metadata.chunks` for later layers with the same window."""
        from attention_kernels import fa4_fwd  # needs the compiler of CuTe

        if self.uses_flags(has_images=batch.spans is not None):
            fa4_fwd.attend_by_flags(
                batch,
                output=output,
                scale=scale,
                softcap=softcap,
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                forward=self.forward,
            )
            return
        chunks = metadata.chunks
        chunks[window_left] = fa4_fwd.attention(
            batch,
            output=output,
            scale=scale,
            window_left=window_left,
            softcap=softcap,
            chunks=chunks.get(window_left),
            forward=self.forward,
        )
