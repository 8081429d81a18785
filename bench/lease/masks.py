"""Attention of a sliding layer of the 26B model with FlashAttention-4: our mask as it was, which
loads a chunk's numbers again and again, our mask, and no mask at all.

    python -m bench.lease.masks

Ours must equal what was to the bit, or the program ends red. Without a mask, a canvas behind a
window also sees the keys of a page before it. A line of JSON for each batch.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

import cutlass.cute as cute
import torch
from cutlass import Int32

from attention_kernels.chunks import CHUNK, Chunks
from attention_kernels.fa4_fwd import band_mask, scalar_to_ssa
from bench.dummy_checkpoint import CANVAS, SHAPE_26B
from bench.lease.timing import error, timed_ms

HEADS, KV_HEADS, HEAD = 16, 8, SHAPE_26B["head_dim"]
WINDOW = SHAPE_26B["sliding_window"] - 1
PAGE = 32  # tokens


@cute.jit
def mask_as_it_was(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """`band_mask` with ordinary loads and two comparisons."""
    bands, chunk = aux_tensors[0], batch_idx[0]  # [C, 3]
    slope = scalar_to_ssa(bands[chunk, 0], Int32)
    low = scalar_to_ssa(bands[chunk, 1], Int32)
    high = scalar_to_ssa(bands[chunk, 2], Int32)
    ahead = kv_idx - slope * q_idx
    return (ahead >= low) & (ahead <= high)


def cut(batch: int, context: int) -> Chunks:
    """Of canvases that are denoised behind `context` tokens."""
    most = -(-(context + CANVAS) // PAGE)
    pages = torch.arange(batch * most, device="cuda", dtype=torch.int32).view(batch, most)

    def same(value: int) -> torch.Tensor:
        return torch.full((batch,), value, device="cuda", dtype=torch.int32)

    rows = torch.arange(0, batch * CANVAS + 1, CANVAS, device="cuda", dtype=torch.int32)
    return Chunks.cut(
        pages, rows, same(context + CANVAS), same(0), same(0),
        num_tokens=batch * CANVAS, block_size=PAGE, window_left=WINDOW,
    )  # fmt: skip


def run(
    chunks: Chunks,
    query: torch.Tensor,  # [T, HEADS, HEAD] bf16
    keys: torch.Tensor,  # [num_blocks, PAGE, KV_HEADS, HEAD] bf16
    values: torch.Tensor,  # like keys
    mask: Callable[..., object] | None,
) -> torch.Tensor:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    output = torch.empty_like(query)
    flash_attn_varlen_func(
        q=query, k=keys, v=values, out=output,
        cu_seqlens_q=chunks.query_start_loc,
        seqused_k=chunks.seq_lens,
        block_table=chunks.block_table,
        max_seqlen_q=CHUNK,
        max_seqlen_k=chunks.block_table.shape[1] * PAGE,
        softmax_scale=HEAD**-0.5,
        num_splits=1,
        fa_version=4,
        mask_mod=mask,
        aux_tensors=None if mask is None else [chunks.bands],
    )  # fmt: skip
    return output


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    masks = {"as it was": mask_as_it_was, "ours": band_mask, "without": None}
    for batch, context in ((1, 128), (1, 1024), (1, 8192), (16, 128), (16, 1024)):
        chunks, dtype = cut(batch, context), torch.bfloat16
        pages = batch * -(-(context + CANVAS) // PAGE)
        torch.manual_seed(0)
        cache = torch.randn(pages, KV_HEADS, PAGE, 2 * HEAD, device="cuda", dtype=dtype)
        keys, values = cache.transpose(1, 2).split(HEAD, dim=-1)
        query = torch.randn(batch * CANVAS, HEADS, HEAD, device="cuda", dtype=dtype)
        expected = run(chunks, query, keys, values, mask_as_it_was)
        for name, mask in masks.items():
            line = {"masks": batch, "context": context, "mask": name}
            attend = partial(run, chunks, query, keys, values, mask)
            found = attend()
            line["error"] = error(found, expected)
            line["ms"] = timed_ms(attend, "cuda")
            print(json.dumps(line), flush=True)
            if mask is not None and not torch.equal(found, expected):
                sys.exit(f"masks: {name} is not what it was, off by {line['error']:.3g}")


if __name__ == "__main__":
    main()
