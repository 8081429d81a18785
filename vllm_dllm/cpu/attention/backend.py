"""CPU attention with the `reference` window rule and images: vLLM's kernel, and a path for what it
cannot compute.

vLLM's CPU kernel takes a causal flag per request and, for bidirectional requests, applies the
`symmetric` rule. Under the `reference` rule all rows of a canvas see the same keys: the last W - 1
tokens of the context and the canvas itself. So attention is two matrix products over those keys,
gathered from the cache, for all canvases together. Images longer than the window are computed the
same way, one by one: each of their rows sees the whole image. So are the second copies of blocks
that are verified, all together.

A block of a block-causal request (`attention_kernels.masks`) sees all keys up to the block's end,
so each block becomes a bidirectional request that ends there. So do the rows of an image, which see
all keys up to its end. For a window that holds the whole image, the kernel's symmetric window is
right as well.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_dllm.attention import WindowRules
from vllm_dllm.compat.attention import set_kernel_isa
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.cpu.attention import canvases
from vllm_dllm.cpu.attention.canvases import CanvasLayout, Image, attend_canvases


@dataclass
class CpuCanvasMetadata(cpu_attn.CPUAttentionMetadata):
    """vLLM's CPU metadata, with the keys of what is computed here: canvases under the reference
    rule, images longer than the window, and second copies of blocks."""

    canvases: tuple[tuple[CanvasLayout, torch.Tensor], ...] = ()
    """Layouts, each with the cache blocks that hold its keys."""


class CpuCanvasMetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """Builds metadata with layouts for sliding-window layers, and for models that verify
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
            canvases.check_cache_layout(self.isa, self.dtype, self.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        window_rules: WindowRules | None = None,
    ) -> CpuCanvasMetadata:
        """Returns the metadata of a step, with requests split into ones that vLLM's kernel can
        compute: causal or bidirectional. It also computes the rows of second copies, as if they
        were causal, which `CpuCanvasImpl` then overwrites."""
        uncut = common_attn_metadata
        common, rules, images = split_at_images(uncut, window_rules or WindowRules())
        common = split_into_blocks(common)
        base = super().build(common_prefix_len, common, fast_build)
        layouts = self._lay_out_windows(common, rules, images) if self.window_size > 0 else []
        found = [(layout, layout.find_blocks(common.block_table_tensor)) for layout in layouts]
        if (copies := self._lay_out_copies(uncut)) is not None:
            found.append((copies, copies.find_blocks(uncut.block_table_tensor)))
        return CpuCanvasMetadata(**vars(base), canvases=tuple(found))

    def _lay_out_copies(self, common: CommonAttentionMetadata) -> CanvasLayout | None:
        """Returns the layout of all second copies of blocks, or None if there are none."""
        if not isinstance(common.causal, torch.Tensor) or int(common.causal.min()) >= 0:
            return None
        return CanvasLayout.build_for_copies(
            common.causal.numpy().astype(np.int64),
            common.query_start_loc[: common.num_reqs + 1].numpy().astype(np.int64),
            common.seq_lens[: common.num_reqs].numpy().astype(np.int64),
            self.block_size,
        )

    def _lay_out_windows(
        self, common: CommonAttentionMetadata, rules: WindowRules, images: list[Image]
    ) -> list[CanvasLayout]:
        """Returns the layout of canvases under the reference rule, if any, and of each image longer
        than the window. Layers of one window and block size share the canvases' by
        `rules.shared`."""
        key = (self.window_size, self.block_size)
        if key not in rules.shared:
            rules.shared[key] = self._lay_out_canvases(common, rules.symmetric)
        layouts = [
            CanvasLayout.build_for_image(image, self.block_size, self.window_size - 1)
            for image in images
            if image.end - image.first_key > self.window_size
        ]
        of_canvases: CanvasLayout | None = rules.shared[key]
        return layouts if of_canvases is None else [of_canvases, *layouts]

    def _lay_out_canvases(
        self, common: CommonAttentionMetadata, symmetric: torch.Tensor | None
    ) -> CanvasLayout | None:
        """Returns the layout of the canvases under the reference rule, or None if there are none.
        `symmetric` [num_reqs]: 1 = the request has the symmetric rule; None: no request has."""
        if not isinstance(common.causal, torch.Tensor):
            return None
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


class CpuCanvasImpl(cpu_attn.CPUAttentionBackendImpl):
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
        *scales: torch.Tensor | None,
        **named_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes the attention of all T rows to `output`, and returns `output`."""
        found = () if attn_metadata is None else attn_metadata.canvases
        if not any(layout.only_canvases for layout, _ in found):
            inputs = layer, query, key, value, kv_cache, attn_metadata, output
            super().forward(*inputs, *scales, **named_scales)
        for layout, blocks in found:
            softcap = self.logits_soft_cap
            attend_canvases(query, kv_cache, layout, blocks, self.scale, output, softcap)
        return output


class CpuCanvasBackend(cpu_attn.CPUAttentionBackend):
    """vLLM's CPU backend with our metadata and attention, for the layers of a diffusion model."""

    @staticmethod
    def get_impl_cls() -> type[cpu_attn.CPUAttentionBackendImpl]:
        return CpuCanvasImpl

    @staticmethod
    def get_builder_cls() -> type[cpu_attn.CPUAttentionMetadataBuilder]:
        return CpuCanvasMetadataBuilder


def split_into_blocks(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Returns `common` with each block-causal request split into one bidirectional request per
    block, and with causal requests in place of verifying ones. Rows stay where they are. Returns
    `common` itself if all requests are causal or bidirectional."""
    causal = common.causal
    if not isinstance(causal, torch.Tensor) or 0 <= int(causal.min()) <= int(causal.max()) <= 1:
        return common
    num_reqs = common.num_reqs
    bounds = common.query_start_loc[: num_reqs + 1].numpy().astype(np.int64)
    causal = common.causal[:num_reqs].numpy().astype(np.int64)
    ends = common.seq_lens[:num_reqs].numpy().astype(np.int64)
    firsts = ends - np.diff(bounds)  # positions of the requests' first rows

    # A request that is not by blocks is one block of its own.
    by_blocks = causal > 1
    size = np.where(by_blocks, causal, ends + 1)
    first_blocks = firsts // size
    num_blocks = np.maximum((ends - 1) // size, first_blocks) - first_blocks + 1
    requests = np.repeat(np.arange(num_reqs), num_blocks)
    nth = np.arange(len(requests)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    block_ends = np.minimum((first_blocks[requests] + nth + 1) * size[requests], ends[requests])
    row_ends = bounds[requests] + block_ends - firsts[requests]
    return replace_requests(
        common,
        requests,
        query_start_loc=np.concatenate(([0], row_ends)),
        seq_lens=block_ends,
        causal=np.where(by_blocks, 0, causal != 0)[requests],
    )


def replace_requests(
    common: CommonAttentionMetadata,
    requests: np.ndarray,  # [n] int, of which request of `common` each of the n new ones is a part
    *,
    query_start_loc: np.ndarray,  # [n + 1] int
    seq_lens: np.ndarray,  # [n] int
    causal: np.ndarray,  # [n] 0 or 1
) -> CommonAttentionMetadata:
    """Returns `common` with its rows divided into n other requests."""
    starts = torch.from_numpy(query_start_loc.astype(np.int32))
    return replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        num_reqs=len(requests),
        max_query_len=int(starts.diff().max()),
        block_table_tensor=common.block_table_tensor[torch.from_numpy(requests)],
        causal=torch.from_numpy(causal.astype(np.int32)),
    )


def split_at_images(
    common: CommonAttentionMetadata, rules: WindowRules
) -> tuple[CommonAttentionMetadata, WindowRules, list[Image]]:
    """Returns `common` with requests split into ones that are all image or have none, the window
    rules of the new requests, and the images. Rows stay where they are."""
    if rules.spans is None:
        return common, rules, []
    assert isinstance(common.causal, torch.Tensor) and rules.symmetric is not None
    num_reqs = common.num_reqs
    bounds = common.query_start_loc[: num_reqs + 1].numpy()
    num_rows = int(bounds[-1])
    spans = rules.spans[:num_rows].numpy()

    changes = np.flatnonzero((spans[1:] != spans[:-1]).any(axis=1)) + 1
    firsts = np.unique(np.concatenate((bounds[:-1], changes)))
    firsts = firsts[firsts < num_rows]  # where requests without rows begin
    row_ends = np.append(firsts[1:], num_rows)
    requests = np.searchsorted(bounds, firsts, side="right") - 1
    is_image = spans[firsts, 1] > 0
    rows_after = bounds[requests + 1] - row_ends
    seq_lens = common.seq_lens.numpy()[requests] - rows_after
    assert (seq_lens == spans[firsts, 1])[is_image].all(), "a step has the last row of its images"

    images = [
        Image(int(i), slice(int(firsts[i]), int(row_ends[i])), *map(int, spans[firsts[i]]))
        for i in np.flatnonzero(is_image)
    ]
    symmetric = np.where(is_image, 1, rules.symmetric.numpy()[requests])
    common = replace_requests(
        common,
        requests,
        query_start_loc=np.append(firsts, num_rows),
        seq_lens=seq_lens,
        causal=np.where(is_image, 0, common.causal.numpy()[requests]),
    )
    return common, replace(rules, symmetric=torch.from_numpy(symmetric.astype(np.int32))), images
