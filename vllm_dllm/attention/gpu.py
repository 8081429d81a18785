"""GPU attention of diffusion models: vLLM's cache and metadata around `attention_kernels`.

`--attention-backend CUSTOM`, the default for our models on a GPU. A layer runs the Triton version,
or FlashAttention-4 if that was asked for (`--attention-config.flash_attn_version 4`) and supports
the layer's head size. Sliding layers apply each request's window rule.
"""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.config.cache import CacheDType
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from attention_kernels import support, triton_fwd
from attention_kernels.fa4 import import_fa4
from vllm_dllm.attention import WindowRules
from vllm_dllm.compat.attention import cache_scales

logger = init_logger(__name__)

_CACHE_DTYPES = {  # others mean the model's
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": support.FP8,
    "fp8_e4m3": support.FP8,
}


@dataclass
class GpuCanvasMetadata:
    """N requests, T rows. The tensors are those of the runner and the model state."""

    num_actual_tokens: int  # T, without the padding of a CUDA graph
    query_start_loc: torch.Tensor  # [N + 1] int32
    seq_lens: torch.Tensor  # [N] int32
    max_seq_len: int
    block_table: torch.Tensor  # [N, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64
    causal: torch.Tensor  # [N] int32
    symmetric: torch.Tensor  # [N] int32
    spans: torch.Tensor | None = None  # [T, 2] int32
    chunks: dict[int, Any] = field(default_factory=dict)  # by window, passed on between layers


class GpuCanvasMetadataBuilder(AttentionMetadataBuilder[GpuCanvasMetadata]):
    """Passes tensors on and computes nothing, so any step can be in a CUDA graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    takes_window_rules = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # abstract in vLLM

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        window_rules: WindowRules | None = None,
    ) -> GpuCanvasMetadata:
        common = common_attn_metadata
        assert isinstance(common.causal, torch.Tensor), "the model state passes a flag per request"
        # The model state's buffers, whose addresses a captured CUDA graph keeps.
        assert window_rules is not None and window_rules.symmetric is not None
        return GpuCanvasMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            symmetric=window_rules.symmetric,
            spans=window_rules.spans,
        )


class GpuCanvasImpl(TritonAttentionImpl):
    """Writes the cache like vLLM's Triton backend and reads it with our kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Queries stay as they are: only the cache is fp8.
        self.supports_quant_query_input = False
        self._fa4: ModuleType | None = None
        if runs_fa4(self.head_size, self.kv_cache_dtype):
            self._fa4 = import_fa4()

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,  # [>= T, Hq, D]
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * D]
        attn_metadata: GpuCanvasMetadata | None,
        output: torch.Tensor,  # [>= T, Hq, D]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert output_scale is None and output_block_scale is None, "not offered to vLLM"
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_scale = value_scale = None
        if self.kv_cache_dtype.startswith("fp8"):
            key_cache, value_cache = (t.view(self.fp8_dtype) for t in (key_cache, value_cache))
            key_scale, value_scale = cache_scales(layer)
        arguments = (
            query[:num_tokens],
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.causal,
        )
        window_left = self.sliding_window[0]
        options = dict(
            symmetric=attn_metadata.symmetric,
            spans=attn_metadata.spans,
            output=output[:num_tokens],
            scale=self.scale,
            window_left=window_left,
            softcap=self.logits_soft_cap,
        )
        if self._fa4 is None:
            triton_fwd.attention(
                *arguments,
                **options,
                key_scale=key_scale,
                value_scale=value_scale,
                max_seq_len=attn_metadata.max_seq_len,
            )
        else:
            chunks = attn_metadata.chunks
            chunks[window_left] = self._fa4.attention(
                *arguments, **options, chunks=chunks.get(window_left)
            )
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


def runs_fa4(head_size: int, kv_cache_dtype: str) -> bool:
    """Whether a layer of the model being built runs FlashAttention-4: if it was asked for and
    supports the layer. Logs the answer."""
    config, capability = get_current_vllm_config_or_none(), current_platform.get_device_capability()
    reason: str | None = "it was not asked for (--attention-config.flash_attn_version 4)"
    if (
        config is not None
        and config.attention_config.flash_attn_version == 4
        and capability is not None
    ):
        query_dtype = config.model_config.dtype
        cache_dtype = _CACHE_DTYPES.get(kv_cache_dtype, query_dtype)
        case = support.Case(
            (capability.major, capability.minor), head_size, query_dtype, cache_dtype
        )
        reason = support.fa4_reason(case)
        reason = reason and f"it only takes {reason}"
    if reason is None:
        logger.info_once("Layers of head size %d run FlashAttention-4.", head_size)
    else:
        logger.info_once(
            "Layers of head size %d run our Triton kernel, not FlashAttention-4: %s.",
            head_size,
            reason,
        )
    return reason is None


class GpuCanvasBackend(TritonAttentionBackend):
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GpuCanvasImpl]:
        return GpuCanvasImpl

    @staticmethod
    def get_builder_cls() -> type[GpuCanvasMetadataBuilder]:
        return GpuCanvasMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in support.TRITON_HEAD_SIZES

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # the number of key splits depends on the batch

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True  # every checkpoint with a vision tower requires it: `GpuCanvasMetadata.spans`

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False
