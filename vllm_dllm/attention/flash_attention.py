"""Runs FlashAttention-4 in our layers, in one of two ways.

By flags: without a window, a request is causal or not, and on Hopper vLLM's copy of
FlashAttention-4 takes a flag for each request.

By masks: the batch is cut into chunks of queries, with our mask function (`fa4_fwd`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attention_kernels.fa4_flags import attend_by_flags
from attention_kernels.support import FA4_HEAD_SIZES, Case, fa4_reason
from vllm_dllm.compat.attention import flash_attention_4

if TYPE_CHECKING:
    from vllm_dllm.attention.gpu import GpuCanvasMetadata

_BY_FLAGS = (*FA4_HEAD_SIZES[9], 512)  # head sizes on Hopper; 512 in vLLM's copy alone


@dataclass(frozen=True)
class FlashAttention:
    """FlashAttention-4 for one kind of layer."""

    forward: Callable[..., Any]  # see `fa4_fwd.Forward`
    has_flags: bool  # whether it can take a causal flag for each request
    has_masks: bool  # whether it can take our mask function

    @classmethod
    def find(cls, case: Case, has_window: bool) -> "FlashAttention | str":
        """Returns FlashAttention-4 for `case`, or the reason why it cannot run, in words that
        follow "because"."""
        has_flags = case.capability[0] == 9 and not has_window and case.head_size in _BY_FLAGS
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

    def can_run(self, metadata: "GpuCanvasMetadata") -> bool:
        """Returns whether it can run a step. Flags allow neither images nor blocks, and masks allow
        no blocks."""
        by_flags = self.has_flags and metadata.spans is None
        return (by_flags or self.has_masks) and not metadata.by_blocks

    def attend(
        self,
        metadata: "GpuCanvasMetadata",
        query: torch.Tensor,  # [T, Hq, D]
        key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
        value_cache: torch.Tensor,
        output: torch.Tensor,  # [T, Hq, D]
        *,
        scale: float,
        window_left: int,
        softcap: float,
    ) -> None:
        """Writes attention's result to `output`, by flags where they suffice, else by masks. Keeps
        the chunks of masks in `metadata.chunks` for later layers with the same window."""
        step = (
            *(query, key_cache, value_cache, metadata.block_table),
            *(metadata.query_start_loc, metadata.seq_lens, metadata.causal),
        )
        if self.has_flags and metadata.spans is None:
            attend_by_flags(
                *step,
                output=output,
                scale=scale,
                softcap=softcap,
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                forward=self.forward,
            )
            return
        from attention_kernels import fa4_fwd  # needs the compiler of CuTe

        chunks = metadata.chunks
        chunks[window_left] = fa4_fwd.attention(
            *step,
            symmetric=metadata.symmetric,
            spans=metadata.spans,
            output=output,
            scale=scale,
            window_left=window_left,
            softcap=softcap,
            chunks=chunks.get(window_left),
            forward=self.forward,
        )
