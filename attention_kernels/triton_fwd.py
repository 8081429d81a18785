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

from attention_kernels.support import check_contiguous, check_last_strides
from attention_kernels.tiles import Tiles
from attention_kernels.triton_kernels import _attention_kernel

MAX_SPLITS = 16
MIN_KEYS_PER_SPLIT = 128
"""With fewer, joining costs more than parallel work gains: on an H200 a step of 64 keys takes a
program 3.9 us on sliding layers of the 26B model (from kernel timelines: 15.8 us for two steps,
27.3 for five)."""
_MOST_JOINED = 1 << 16  # most tiles of a launch that splits keys; it has few, or it would not split


def attention(
    query: torch.Tensor,  # [T, Hq, D] fp16, bf16 or fp32
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D] query's dtype or fp8 e4m3
    value_cache: torch.Tensor,  # like key_cache
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [num_reqs] int32
    causal: torch.Tensor,  # [num_reqs] int32
    *,
    symmetric: torch.Tensor,  # [num_reqs] int32
    output: torch.Tensor,  # [T, Hq, D], written at the rows of requests
    scale: float,
    window_left: int,
    softcap: float,
    key_scale: torch.Tensor | None,  # [1] fp32
    value_scale: torch.Tensor | None,
    max_seq_len: int,
    spans: torch.Tensor | None = None,  # [T, 2] int32; None: no images
    num_splits: int | None = None,  # None: enough to fill the GPU
    verifies: bool = False,  # whether `causal` may be negative
) -> None:
    """Writes to `output` what `api.attention` describes; that function checks the other arguments.
    Launches on one device must follow one another, because those that split keys share counters.

    Raises:
        ValueError: for a tensor that is not contiguous along its last dimension; for tensors that
            are not on a GPU; and for bf16 in Triton's interpreter, which multiplies it wrongly.
    """
    _check_device(query)
    check_last_strides(
        "triton",
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        causal=causal,
        window_rule=symmetric,
        output=output,
    )
    check_contiguous("triton", spans)
    if len(query) == 0 or len(seq_lens) == 0:
        return
    cut = _Cut.choose(query, key_cache, len(seq_lens), window_left, max_seq_len, num_splits)
    partial_output = partial_lse = arrivals = output  # unused unless the keys are split
    if cut.num_splits > 1:
        shape = (cut.num_splits, *query.shape[:2])
        partial_output = query.new_empty(*shape, query.shape[2], dtype=torch.float32)
        partial_lse = query.new_empty(shape, dtype=torch.float32)
        arrivals = _arrivals(query.device)
        assert cut.num_tiles * cut.num_parts * key_cache.shape[2] <= len(arrivals)
    _launch(
        (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, causal, symmetric),
        spans,
        (key_scale, value_scale),
        (output, partial_output, partial_lse, arrivals),
        cut,
        scale=scale,
        window_left=window_left,
        softcap=softcap,
        verifies=verifies,
    )


@dataclass(frozen=True)
class _Cut:
    """How one launch is divided: into tiles of queries, heads of a tile, shares of the keys."""

    tiles: Tiles
    num_reqs: int
    num_tiles: int
    num_parts: int  # programs that share a key head
    num_splits: int

    @classmethod
    def choose(
        cls,
        query: torch.Tensor,  # [T, Hq, D]
        key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
        num_reqs: int,
        window_left: int,
        max_seq_len: int,
        num_splits: int | None,
    ) -> "_Cut":
        """Returns how to divide a launch. `num_splits`: shares of the keys; None: enough to fill
        the GPU."""
        num_tokens, num_heads, head_size = query.shape
        num_kv_heads = key_cache.shape[2]
        group = num_heads // num_kv_heads
        tiles = Tiles.choose(
            head_size,
            group,
            query.element_size(),
            key_cache.element_size(),
            _capability(query.device),
        )
        num_parts = triton.cdiv(group, tiles.heads)
        if num_splits is None:
            in_window = min(max_seq_len, window_left + num_tokens)
            num_keys = max_seq_len if window_left < 0 else in_window
            # Tiles with queries are at least so many; no request is expected to be empty.
            num_busy = max(num_tokens // tiles.block_q, num_reqs) * num_kv_heads * num_parts
            num_splits = _choose_splits(num_busy, num_keys, _num_processors(query.device))
        # A request of q queries has at most q // block_q + 1 tiles; see `find_request`.
        num_tiles = num_tokens // tiles.block_q + num_reqs
        return cls(tiles, num_reqs, num_tiles, num_parts, num_splits)


def _launch(
    inputs: tuple[torch.Tensor, ...],  # those of `attention`, from `query` to `symmetric`
    spans: torch.Tensor | None,  # [T, 2] int32
    scales: tuple[torch.Tensor | None, torch.Tensor | None],  # of keys, of values
    outputs: tuple[torch.Tensor, ...],  # whole; of each share: partial, log-sum-exp; arrivals
    cut: _Cut,
    *,
    scale: float,
    window_left: int,
    softcap: float,
    verifies: bool,
) -> None:
    """Launches the kernel, which writes attention's result and the shares' results into
    `outputs`."""
    query, key_cache, value_cache, block_table = inputs[:4]
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    tiles = cut.tiles
    _attention_kernel[(cut.num_tiles, num_kv_heads * cut.num_parts, cut.num_splits)](
        *inputs,
        spans,
        *(query if scale_of is None else scale_of for scale_of in scales),
        *outputs,
        cut.num_reqs,
        num_tokens,
        window_left,
        scale,
        softcap,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        *outputs[0].stride()[:2],
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
        HAS_KEY_SCALE=scales[0] is not None,
        HAS_VALUE_SCALE=scales[1] is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
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
