"""Attention of a sliding layer of the 26B model with FlashAttention-4: our mask on every pair of
query and key, on the key blocks that need it alone, and no mask at all.

    python -m bench.lease.masks

All queries of a canvas see one range of keys, so only the block where it begins needs a mask.
FlashAttention-4 takes lists of blocks to mask, to read whole, and to leave out
(`block_sparse_tensors`). A measurement, not a product: nobody has run it on a GPU. "Without" is
wrong by the keys of a page before the window; any other wrong result ends the program. A line of
JSON for each batch; on a CPU, the lists alone.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from attention_kernels import chunks as chunks_module
from attention_kernels.chunks import CHUNK, Chunks
from attention_kernels.interpreter import interpret_kernels
from bench.dummy_checkpoint import CANVAS, SHAPE_26B
from bench.lease.timing import error, timed_ms

HEADS, KV_HEADS, HEAD = 16, 8, SHAPE_26B["head_dim"]
WINDOW = SHAPE_26B["sliding_window"] - 1
PAGE = 32  # tokens
ROWS, KEYS = 128, 80  # of a tile of FlashAttention-4 on Hopper with this head size
MOST_OFF = 2.0**-7  # a share: sums of bf16 in another order
TILES = HEADS // KV_HEADS * CHUNK // ROWS
"""Tiles of a chunk: the query heads of one key head are rows of one tile."""


class Blocks(NamedTuple):
    """Blocks of `KEYS` keys for each tile of queries, as FlashAttention-4 takes them. All int32."""

    masked_count: torch.Tensor  # [1, C * TILES]
    masked: torch.Tensor  # [1, C * TILES * N]
    whole_count: torch.Tensor
    whole: torch.Tensor
    tiles_before: torch.Tensor  # [C + 1]
    listed_before: torch.Tensor  # [C + 1]


def list_blocks(chunks: Chunks) -> Blocks:
    """Returns the blocks that some query of a chunk sees: to read whole those of which every query
    sees every key, and the others masked. A chunk's tiles all get its lists."""
    slope, low, high = chunks.bands.unbind(-1)
    last_row = (chunks.query_start_loc.diff() - 1).clamp(min=0)
    most = -(-chunks.block_table.shape[1] * PAGE // KEYS)
    first = torch.arange(most, device=low.device) * KEYS  # [N]
    last = torch.minimum(first + KEYS, chunks.seq_lens[:, None]) - 1  # [C, N]
    is_there = first < chunks.seq_lens[:, None]
    is_seen = (last >= low[:, None]) & (first <= (high + slope * last_row)[:, None]) & is_there
    is_whole = (first >= (low + slope * last_row)[:, None]) & (last <= high[:, None]) & is_seen
    count = -(-chunks.seq_lens // KEYS)  # of a chunk's blocks: its lists are so far apart

    def packed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts and lists, one after the other as FlashAttention-4 finds them."""
        lists = (~chosen).int().argsort(dim=1, stable=True)  # those that are chosen come first
        tile = torch.arange(TILES, device=low.device)
        start = (listed_before[:-1, None] + tile * count[:, None])[..., None]  # [C, TILES, 1]
        place = start + torch.arange(most, device=low.device)
        flat = low.new_zeros(len(low) * TILES * most + most)
        used = torch.arange(most, device=low.device) < count[:, None, None]
        spare = len(flat) - 1
        flat[torch.where(used, place, spare).flatten()] = (
            lists[:, None].expand(-1, TILES, -1).flatten().int()
        )
        return chosen.sum(1).repeat_interleave(TILES)[None].int(), flat[None]

    listed_before = torch.nn.functional.pad((count * TILES).cumsum(0), (1, 0)).int()
    tiles_before = torch.arange(len(low) + 1, device=low.device, dtype=torch.int32) * TILES
    masked, whole = packed(is_seen & ~is_whole), packed(is_whole)
    return Blocks(*masked, *whole, tiles_before, listed_before)


def cut(batch: int, context: int, device: str) -> Chunks:
    """Of canvases that are denoised behind `context` tokens."""
    most = -(-(context + CANVAS) // PAGE)
    pages = torch.arange(batch * most, device=device, dtype=torch.int32).view(batch, most)

    def same(value: int) -> torch.Tensor:
        return torch.full((batch,), value, device=device, dtype=torch.int32)

    rows = torch.arange(0, batch * CANVAS + 1, CANVAS, device=device, dtype=torch.int32)
    return Chunks.cut(
        pages, rows, same(context + CANVAS), same(0), same(0),
        num_tokens=batch * CANVAS, block_size=PAGE, window_left=WINDOW,
    )  # fmt: skip


def candidates(
    chunks: Chunks, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from attention_kernels.fa4_fwd import band_mask

    blocks = list_blocks(chunks)
    masks = {"mask_mod": band_mask, "aux_tensors": [chunks.bands]}
    lists = {"block_sparse_tensors": BlockSparseTensorsTorch(*blocks, (ROWS, KEYS))}

    def run(**options: object) -> torch.Tensor:
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
            **options,
        )  # fmt: skip
        return output

    return {  # what may not run comes last
        "everywhere": partial(run, **masks),
        "without": run,
        "where needed": partial(run, **masks, **lists),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        interpret_kernels(chunks_module)
        counts = list_blocks(cut(1, 3000, "cpu"))
        print("masks: FlashAttention-4 needs a GPU; the lists of blocks alone")
        found = {"masked": int(counts.masked_count.max()), "whole": int(counts.whole_count.max())}
        print(json.dumps({"masks": 1, "context": 3000, **found}))
        return
    for batch, context in ((1, 128), (1, 1024), (1, 8192), (16, 128), (16, 1024)):
        chunks, dtype = cut(batch, context, "cuda"), torch.bfloat16
        pages = batch * -(-(context + CANVAS) // PAGE)
        torch.manual_seed(0)
        cache = torch.randn(pages, KV_HEADS, PAGE, 2 * HEAD, device="cuda", dtype=dtype)
        keys, values = cache.transpose(1, 2).split(HEAD, dim=-1)
        query = torch.randn(batch * CANVAS, HEADS, HEAD, device="cuda", dtype=dtype)
        runs = candidates(chunks, query, keys, values)
        expected = runs["everywhere"]()
        for name, run in runs.items():
            line = {"masks": batch, "context": context, "mask": name}
            off = error(run(), expected)
            print(json.dumps(line | {"ms": timed_ms(run, "cuda"), "error": off}), flush=True)
            if name != "without" and not off <= MOST_OFF:
                sys.exit(f"masks: {name} is off by {off:.3g}, allowed is {MOST_OFF:.3g}")


if __name__ == "__main__":
    main()
