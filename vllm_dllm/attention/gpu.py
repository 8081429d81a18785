"""vLLM's attention backend for our models on GPUs, around `attention_kernels`.

It is `--attention-backend CUSTOM`, the default for our models. A layer runs Triton or
FlashAttention-4, whichever is faster for the step (`choice.py`), or what
`--attention-config.flash_attn_version` says: 4, or another number for Triton alone. Layers with a
window apply each request's window rule.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
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
from attention_kernels.batch import Batch
from vllm_dllm.attention import WindowRules
from vllm_dllm.attention.choice import Choice, LayerKind, Times, Version
from vllm_dllm.attention.flash_attention import FlashAttention
from vllm_dllm.compat.attention import kv_cache_scales
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.measured import folder

logger = init_logger(__name__)


@dataclass
class GpuCanvasMetadata:
    """The metadata of a step's N requests and T rows, which its layers read. The tensors are
    buffers of the runner and the model state."""

    num_actual_tokens: int  # T, without the padding of a CUDA graph
    max_query_len: int
    query_start_loc: torch.Tensor  # [N + 1] int32
    seq_lens: torch.Tensor  # [N] int32
    max_seq_len: int
    block_table: torch.Tensor  # [N, max_blocks] int32
    causal: torch.Tensor  # [N] int32
    by_blocks: bool  # whether `causal` may hold numbers above 1, or negative ones without `spans`
    symmetric: torch.Tensor  # [N] int32
    spans: torch.Tensor | None = None  # [T, 2] int32
    chunks: dict[int, Any] = field(default_factory=dict)  # by window, passed on between layers


class GpuCanvasMetadataBuilder(AttentionMetadataBuilder[GpuCanvasMetadata]):
    """Builds metadata without computing anything, so any step can be in a CUDA graph."""

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
        """Returns the metadata of a step, made of the runner's tensors and `window_rules`, without
        copies."""
        common = common_attn_metadata
        assert isinstance(common.causal, torch.Tensor), "the model state passes a flag per request"
        # The model state's buffers, whose addresses a captured CUDA graph keeps.
        assert window_rules is not None and window_rules.symmetric is not None
        return GpuCanvasMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            block_table=common.block_table_tensor,
            causal=common.causal,
            by_blocks=window_rules.by_blocks,
            symmetric=window_rules.symmetric,
            spans=window_rules.spans,
        )


class GpuCanvasImpl(TritonAttentionImpl):
    """Writes the cache like vLLM's Triton backend and reads it with our kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Queries stay as they are: only the cache is fp8.
        self.supports_quant_query_input = False
        self.kind = LayerKind(
            self.head_size, self.num_heads, has_window=self.sliding_window[0] >= 0
        )
        config = get_current_vllm_config_or_none()
        masked = None if config is None else MaskedConfig.if_masked(config)
        # Whether requests may verify drafts in a second copy of their block.
        self.verifies = masked is not None and masked.verifies_copies
        self.choose_version()

    def choose_version(self) -> None:
        """Chooses the versions that this layer runs. Called again when a server has measured."""
        self.choice, self.fa4 = choose_versions(self.kind, self.kv_cache_dtype)

    def force_version(self, version: Version, flash_attention: FlashAttention | None) -> None:
        """Makes every step run one version, so that it can be timed, until `choose_version` is
        called."""
        self.choice, self.fa4 = Choice(((0, version),)), flash_attention

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
        """Writes attention's result to `output`, in the version chosen for the step, and returns
        `output`."""
        assert output_scale is None and output_block_scale is None, "not offered to vLLM"
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_scale = value_scale = None
        if self.kv_cache_dtype.startswith("fp8"):
            key_cache, value_cache = (t.view(self.fp8_dtype) for t in (key_cache, value_cache))
            key_scale, value_scale = kv_cache_scales(layer)
        batch = Batch(
            query=query[:num_tokens],
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=attn_metadata.block_table,
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            causal=attn_metadata.causal,
            symmetric=attn_metadata.symmetric,
            spans=attn_metadata.spans,
        )
        options: dict[str, Any] = dict(
            output=output[:num_tokens],
            scale=self.scale,
            window_left=self.sliding_window[0],
            softcap=self.logits_soft_cap,
        )
        fa4 = self.fa4 if self.choice.version_for(num_tokens) == "fa4" else None
        has_images = batch.spans is not None
        if fa4 is not None and fa4.can_run(has_images, attn_metadata.by_blocks):
            fa4.attend(batch, attn_metadata, **options)
            return output
        triton_fwd.attention(
            batch,
            key_scale=key_scale,
            value_scale=value_scale,
            max_seq_len=attn_metadata.max_seq_len,
            verifies=self.verifies,
            **options,
        )
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


def choose_versions(layer: LayerKind, kv_cache_dtype: str) -> tuple[Choice, FlashAttention | None]:
    """Returns the versions that a layer of the model being built runs, and FlashAttention-4 if one
    of them is. Logs the choice once for each kind of layer."""
    triton = Choice(((0, "triton"),))
    config, capability = get_current_vllm_config_or_none(), current_platform.get_device_capability()
    if config is None or capability is None:
        return triton, None
    asked_for = config.attention_config.flash_attn_version
    choice, why = triton, "--attention-config.flash_attn_version asks for no FlashAttention-4"
    if asked_for == 4:
        choice, why = Choice(((0, "fa4"),)), "--attention-config.flash_attn_version 4"
    elif asked_for is None:
        why = "no measured times"
        for times in load_times(config):
            if chosen := times.choose(layer, config.model_config.max_model_len):
                choice, why = chosen, f"measured on an {times.gpu}"
                break
    fa4: FlashAttention | None = None
    if choice != triton:
        found = FlashAttention.find(layer, config.model_config.dtype, kv_cache_dtype)
        if isinstance(found, FlashAttention):
            fa4 = found
        else:
            choice, why = triton, f"not FlashAttention-4: {found}"
    logger.info_once(
        "Attention layers of head size %d %s a window run %s (%s).",
        layer.head_size,
        "with" if layer.has_window else "without",
        str(choice),
        why,
    )
    return choice, fa4


def load_times(config: VllmConfig) -> list[Times]:
    """Returns the times of attention that the setting `kernel_choice` selects, those that count
    first: this server's, which may lack kinds of layers, and those shipped for such a GPU. Returns
    none if the setting is "stock"."""
    choice = ExtensionConfig.from_additional_config(config.additional_config).kernel_choice
    if choice == "stock":
        return []
    found = folder.read_result(folder.result_folder(config)) if choice == "measured" else None
    capability = current_platform.get_device_capability()
    shipped = Times.shipped((capability.major, capability.minor))
    return [times for times in (found and Times.from_json(found), shipped) if times]


class GpuCanvasBackend(TritonAttentionBackend):
    """Tells vLLM what our GPU attention supports."""

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
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    supports_alibi_sqrt = supports_rswa = supports_sink
    supports_batch_invariance = supports_sink  # the number of key splits depends on the batch
