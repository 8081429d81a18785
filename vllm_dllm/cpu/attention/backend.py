"""CPU attention with the `reference` window rule and images: vLLM's kernel, and a path for what it
cannot compute.

vLLM's CPU kernel takes a causal flag per request and, for bidirectional requests, applies the
`symmetric` rule. Under the `reference` rule all rows of a canvas see the same keys: the last W - 1
tokens of the context and the canvas itself. So attention is two matrix products over those keys,
gathered from the cache, for all canvases together. Images longer than the window are computed the
same way, one by one: each of their rows sees the whole image. So are the second copies of blocks
that are verified, all together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_dllm.attention import WindowRules
from vllm_dllm.compat.attention import set_kernel_isa
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.cpu.attention.canvases import (
    CanvasKeys,
    CanvasLayout,
    attend_canvases,
    check_cache_layout,
)
from vllm_dllm.cpu.attention.cuts import Image, split_at_images, split_into_blocks


@dataclass
class CpuCanvasMetadata(CPUAttentionMetadata):
    """vLLM's CPU metadata, with the keys of canvases under the reference rule, of images longer
    than the window, and of second copies of blocks. `canvas_keys` None: the step has no such
    canvas."""

    canvas_keys: CanvasKeys | None = None
    more_keys: tuple[CanvasKeys, ...] = ()  # of images and copies


class CpuCanvasMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata with `CanvasKeys` for sliding-window layers, and for models that verify
    blocks in a second copy. Other layers have none."""

    takes_window_rules = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        masked = MaskedConfig.if_masked(vllm_config)
        if self.window_size > 0 or (masked is not None and masked.verifies_copies):
            if self.isa == "amx":  # its cache is laid out for tiles
                set_kernel_isa(self, "vec", layer_names)
            check_cache_layout(self.isa, self.dtype, self.kv_cache_dtype, self.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        window_rules: WindowRules | None = None,
    ) -> CpuCanvasMetadata:
        """Returns the metadata of a step. Requests are split into ones that vLLM's kernel can
        compute, which are causal or bidirectional."""
        rules = window_rules or WindowRules()
        copy_keys = self._build_copy_keys(common_attn_metadata)
        common, rules, images = split_at_images(common_attn_metadata, rules)
        common = split_into_blocks(common)
        base = super().build(common_prefix_len, common, fast_build)
        return CpuCanvasMetadata(
            **vars(base),
            canvas_keys=self._build_canvas_keys(common, rules),
            more_keys=(*self._build_image_keys(common, images), *copy_keys),
        )

    def _build_copy_keys(self, common: CommonAttentionMetadata) -> tuple[CanvasKeys, ...]:
        """Returns the keys of the second copies of all blocks that the step verifies; empty if
        there are none. vLLM's kernel computes these rows, too, as if they were causal."""
        if not isinstance(common.causal, torch.Tensor) or int(common.causal.min()) >= 0:
            return ()
        layout = CanvasLayout.build_for_copies(
            common.causal.numpy().astype(np.int64),
            common.query_start_loc[: common.num_reqs + 1].numpy().astype(np.int64),
            common.seq_lens[: common.num_reqs].numpy().astype(np.int64),
            self.block_size,
        )
        if layout is None:
            return ()
        return (CanvasKeys.build(layout, common.block_table_tensor.numpy()),)

    def _build_image_keys(
        self, common: CommonAttentionMetadata, images: list[Image]
    ) -> tuple[CanvasKeys, ...]:
        """Returns the keys of each image that is longer than the window; empty for layers without a
        window."""
        if self.window_size <= 0:
            return ()
        table = common.block_table_tensor.numpy()
        return tuple(
            CanvasKeys.build(
                CanvasLayout.build_for_image(image, self.block_size, self.window_size - 1), table
            )
            for image in images
            if image.end - image.first_key > self.window_size
        )

    def _build_canvas_keys(
        self, common: CommonAttentionMetadata, rules: WindowRules
    ) -> CanvasKeys | None:
        """Returns the keys of canvases under the reference rule. None if there are none, or the
        layers have no window. Layers of the same window and block size share the layout, which is
        stored in `rules.shared`."""
        if self.window_size <= 0 or not isinstance(common.causal, torch.Tensor):
            return None
        key = (self.window_size, self.block_size)
        if key not in rules.shared:
            rules.shared[key] = self._build_layout(common, rules.symmetric)
        layout = rules.shared[key]
        if layout is None:
            return None
        return CanvasKeys.build(layout, common.block_table_tensor.numpy())

    def _build_layout(
        self, common: CommonAttentionMetadata, symmetric: torch.Tensor | None
    ) -> CanvasLayout | None:
        """Returns the layout of canvases under the reference rule, or None if there are none.
        `symmetric` [num_reqs]: 1 = the request has the symmetric rule; None: no request has."""
        query_start_loc = common.query_start_loc[: common.num_reqs + 1].numpy()
        bidirectional = common.causal.numpy() == 0
        if symmetric is not None:
            bidirectional &= symmetric.numpy() == 0
        selected = np.flatnonzero(bidirectional & (np.diff(query_start_loc) > 0))
        if len(selected) == 0:
            return None
        return CanvasLayout.build(
            selected,
            query_start_loc,
            common.seq_lens.numpy(),
            self.block_size,
            self.window_size - 1,
        )


class CpuCanvasImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, except that canvases under the reference rule, images longer than the
    window and second copies of blocks are computed here."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,  # [T, Hq, D]
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * D]
        attn_metadata: CpuCanvasMetadata | None,
        output: torch.Tensor,  # [T, Hq, D]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of all T rows to `output`, and returns `output`."""
        canvas_keys = attn_metadata.canvas_keys if attn_metadata is not None else None
        more_keys = attn_metadata.more_keys if attn_metadata is not None else ()
        if canvas_keys is None or not canvas_keys.layout.only_canvases:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        computed_here = more_keys if canvas_keys is None else (canvas_keys, *more_keys)
        for keys in computed_here:
            attend_canvases(query, kv_cache, keys, self.scale, output, self.logits_soft_cap)
        return output


class CpuCanvasBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our metadata and attention, for the layers of a diffusion model."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CpuCanvasImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CpuCanvasMetadataBuilder
