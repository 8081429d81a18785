"""Paged attention with a causal flag per request and one- or two-sided windows, in Triton.

A program computes a tile of queries of one request, for the query heads that share a key head (as
many as the tile holds), over a share of the keys that the tile sees (split-KV), and joins the
shares if it is the last one. The grid depends only on shapes, so a captured CUDA graph stays valid
whatever the tensors hold at replay; it has room for the shares of the longest context, and a tile
makes as many as its own keys are worth.

Legend: T queries in all, Hq / Hkv query / key heads, D head size, G = Hq / Hkv, S splits.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from attention_kernels.batch import Batch
from attention_kernels.tiles import Tiles
from attention_kernels.triton_kernels import _attention_kernel

MAX_SPLITS = 16
MIN_KEYS_PER_SPLIT = 128
"""With fewer, joining costs more than parallel work gains: on an H200 a step of 64 keys takes a
program 3.9 us on sliding layers of the 26B model (from kernel timelines: 15.8 us for two steps,
27.3 for five)."""
_MOST_JOINED = 1 << 16  # most tiles of a launch that splits keys; it has few, or it would not split


def attention(
    batch: Batch,
    *,
    output: torch.Tensor,  # [T, Hq, D], written at the rows of requests
    scale: float,
    window_left: int,
    softcap: float,
    key_scale: torch.Tensor | None,  # [1] fp32
    value_scale: torch.Tensor | None,
    max_seq_len: int,
    verifies: bool = False,  # whether `batch.causal` may be negative
) -> None:
    """Writes to `output` what `api.attention` describes; that function checks the other arguments.
    Launches on one device must follow one another, because those that split keys share counters.

    Raises:
        ValueError: for a tensor that is not contiguous along its last dimension; for tensors that
            are not on a GPU; and for bf16 in Triton's interpreter, which multiplies it wrongly.
    """
    query, key_cache, value_cache = batch.query, batch.key_cache, batch.value_cache
    _check_device(query)
    batch.check_strides("triton", output)
    if batch.is_empty:
        return
    cut = _Cut.choose(batch, window_left, max_seq_len)
    partial_output, partial_lse, arrivals = cut.allocate_shares(output)
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    tiles = cut.tiles
    _attention_kernel[(cut.num_tiles, num_kv_heads * cut.num_parts, cut.num_splits)](
        query,
        key_cache,
        value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.causal,
        batch.symmetric,
        batch.spans,
        query if key_scale is None else key_scale,
        query if value_scale is None else value_scale,
        output,
        partial_output,
        partial_lse,
        arrivals,
        len(batch.seq_lens),
        num_tokens,
        window_left,
        scale,
        softcap,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        batch.block_table.stride(0),
        *output.stride()[:2],
        HQ=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEADS=tiles.heads,
        PARTS=cut.num_parts,
        D=head_size,
        D_PADDED=triton.next_power_of_2(head_size),
        PAGE=block_size,
        BLOCK_Q=tiles.block_q,
        BLOCK_N=tiles.block_n,
        LAGS=tiles.lags,
        SPLITS=cut.num_splits,
        LEAST_SHARE=max(1, MIN_KEYS_PER_SPLIT // tiles.block_n),
        HAS_WINDOW=window_left >= 0,
        VERIFIES=verifies,
        HAS_SOFTCAP=softcap > 0,
        HAS_KEY_SCALE=key_scale is not None,
        HAS_VALUE_SCALE=value_scale is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@dataclass(frozen=True)
class _Cut:
    """How one launch is divided: into tiles of queries, heads of a tile, shares of the keys."""

    tiles: Tiles
    num_tiles: int
    num_parts: int  # programs that share a key head
    num_splits: int  # the most shares of a tile's keys
    num_counters: int  # of shares that are done

    @classmethod
    def choose(cls, batch: Batch, window_left: int, max_seq_len: int) -> "_Cut":
        """Returns how to divide a launch, with as many shares of the keys as fill the GPU."""
        query, key_cache, num_reqs = batch.query, batch.key_cache, len(batch.seq_lens)
        num_tokens, num_heads, head_size = query.shape
        num_kv_heads = key_cache.shape[2]
        group = num_heads // num_kv_heads
        tiles = Tiles.choose(
            head_size=head_size,
            group=group,
            element_size=query.element_size(),
            cache_element_size=key_cache.element_size(),
            capability=_capability(query.device),
        )
        num_parts = triton.cdiv(group, tiles.heads)
        in_window = min(max_seq_len, window_left + num_tokens)
        num_keys = max_seq_len if window_left < 0 else in_window
        # Tiles with queries are at least so many; no request is expected to be empty.
        num_busy = max(num_tokens // tiles.block_q, num_reqs) * num_kv_heads * num_parts
        num_splits = _choose_splits(num_busy, num_keys, _num_processors(query.device))
        # A request of q queries has at most q // block_q + 1 tiles; see `find_request`.
        num_tiles = num_tokens // tiles.block_q + num_reqs
        return cls(
            tiles=tiles,
            num_tiles=num_tiles,
            num_parts=num_parts,
            num_splits=num_splits,
            num_counters=num_tiles * num_parts * num_kv_heads,
        )

    def allocate_shares(
        self, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what the kernel calls `partial_output`, `partial_lse` and `arrivals`. If the keys
        are not split, it does not use them, and all three are `output`."""
        if self.num_splits == 1:
            return output, output, output
        arrivals = _arrivals(output.device)
        assert self.num_counters <= len(arrivals)
        shape = (self.num_splits, *output.shape)
        return (
            output.new_empty(shape, dtype=torch.float32),
            output.new_empty(shape[:-1], dtype=torch.float32),
            arrivals,
        )


def _check_device(query: torch.Tensor) -> None:
    """Raises ValueError where the kernel cannot run, or would compute wrongly."""
    interpreted = not isinstance(_attention_kernel, triton.runtime.JITFunction)
    if interpreted and query.dtype == torch.bfloat16:
        raise ValueError(
            "impl 'triton' takes float16 and float32 in Triton's interpreter, which multiplies "
            "bfloat16 wrongly, got query with torch.bfloat16: use another dtype, or a GPU without "
            "TRITON_INTERPRET"
        )
    if not interpreted and query.device.type != "cuda":
        raise ValueError(
            f"impl 'triton' takes tensors on a GPU, got query on {query.device}: move all tensors "
            f"to a GPU, pass impl='reference', which runs anywhere, or set TRITON_INTERPRET=1 "
            f"before Triton is imported"
        )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Returns the GPU's compute capability; without a GPU, Hopper's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Returns the counters of shares that are done, [_MOST_JOINED] int32. They are zero before and
    after each launch, and have one address for all graphs.

    Raises:
        RuntimeError: in the capture of a CUDA graph, whose first replay alone would clear them.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention must have run once before it is captured in a CUDA graph")
    return torch.zeros(_MOST_JOINED, dtype=torch.int32, device=device)


@cache
def _num_processors(device: torch.device) -> int:
    """Returns the number of the GPU's streaming multiprocessors. Returns 1 for the interpreter,
    which runs programs in turn."""
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1


def _choose_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """Returns how many shares to split the keys into: as many as the processors can run at once,
    unless the shares would be too short. The number is a power of two, because each is compiled
    separately."""
    possible = min(num_processors // num_programs, num_keys // MIN_KEYS_PER_SPLIT, MAX_SPLITS)
    return 1 << (max(possible, 1).bit_length() - 1)
