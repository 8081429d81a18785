"""The same attention with FlashAttention-4, on Hopper and Blackwell, in one of two ways.

By flags (`attend_by_flags`): vLLM's copy takes a causal flag for each request on Hopper, which is
all that layers without a window need.

By masks (`attention`): FlashAttention-4 has one window per launch, but accepts a mask function with
tensors of its own. So the batch is cut into chunks (`chunks.py`), which still skips keys that no
query sees, and `band_mask` masks inside each chunk, or `image_mask` in a step with images. The hash
of the function's own text is part of FlashAttention-4's compile key, so no variant is mistaken for
another. Who keeps kernels on a disk must tell apart what these functions call.

An argument says which FlashAttention-4 runs: that of the package flash-attn-4, or a copy of it. The
file itself needs only their compiler, nvidia-cutlass-dsl.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32
from cutlass._mlir.dialects import llvm

from attention_kernels.batch import Batch
from attention_kernels.chunks import CHUNK, Chunks

Forward = Callable[..., Any]
"""FlashAttention-4 with the arguments of vLLM's `flash_attn_varlen_func`."""

_ALIGNMENT = 16  # bytes, for its vectorised loads


@cute.jit
def scalar_to_ssa(value, dtype):
    """What masks compute with, as FlashAttention-4's `utils.scalar_to_ssa` makes it."""
    vector = cute.make_rmem_tensor(1, dtype)
    vector[0] = value
    return vector.load()


def load_once(tensor, place):
    """The int32 at `place`, which nothing writes while the kernel runs. Knowing that, the compiler
    loads it once; else barriers would make it load again for each block of keys, and for each pair
    of query and key in the first block."""
    at = tensor.iterator + cute.crd2idx(place, tensor.layout)
    return Int32(llvm.load(Int32.mlir_type, at.llvm_ptr, invariant=True))


@cute.jit
def after(first, kv_idx):
    """How many keys `kv_idx` is behind the number `first`; many, if it is before. So one comparison
    tells whether it is in a range."""
    return (kv_idx - scalar_to_ssa(first, Int32)).to(Uint32)


@cute.jit
def band_mask(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """low <= k - slope * q <= high, with the chunk's numbers."""
    bands, chunk = aux_tensors[0], batch_idx[0]  # [C, 3]
    slope, low = load_once(bands, (chunk, 0)), load_once(bands, (chunk, 1))
    most = scalar_to_ssa(load_once(bands, (chunk, 2)) - low, Uint32)
    return after(low + slope * q_idx[0], kv_idx) <= most


@cute.jit
def image_mask(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """`band_mask`, or the key is one of the row's image."""
    images, chunk = aux_tensors[1], batch_idx[0]  # [C, CHUNK, 2]
    # A tile may reach past the chunk; nobody reads that.
    row = min(q_idx[0], images.shape[1] - 1)
    first, end = load_once(images, (chunk, row, 0)), load_once(images, (chunk, row, 1))
    length = scalar_to_ssa(max(end - first, 0), Uint32)
    is_seen = band_mask(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors)
    return is_seen | (after(first, kv_idx) < length)


def attend_by_flags(
    batch: Batch,  # without images; its window rules are not read
    *,
    output: torch.Tensor,  # [T, Hq, D]
    scale: float,
    softcap: float,
    max_query_len: int,  # tokens
    max_seq_len: int,  # tokens
    forward: Forward,  # that of vLLM
) -> None:
    """Writes attention's result for a layer without a window to `output`. Requests are causal or
    not, as `batch.causal` says."""
    forward(
        q=batch.query,
        k=batch.key_cache,
        v=batch.value_cache,
        out=output,
        cu_seqlens_q=batch.query_start_loc,
        seqused_k=batch.seq_lens,
        block_table=batch.block_table,
        max_seqlen_q=max(max_query_len, CHUNK),  # fewer would be another compile key
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        softcap=softcap,
        causal=True,  # where the request's flag says so
        dynamic_causal=batch.causal,
    )


def attention(
    batch: Batch,  # fp16 or bf16, the cache like the query
    *,
    output: torch.Tensor,  # [T, Hq, D], written at the rows of requests
    scale: float,
    window_left: int,
    softcap: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    chunks: Chunks | None = None,  # from an earlier layer with the same batch and window
    forward: Forward | None = None,  # None: that of the package flash-attn-4
) -> Chunks | None:
    """Writes to `output` what `api.attention` describes; that function checks the other arguments.
    Returns the chunks, for the next layer, or None if there are no queries.

    If a page is one key tile, all of it is read. Numbers behind the end of a sequence in its last
    page are then multiplied by 0, so they must be finite.

    Raises:
        ValueError: for scales, which only an fp8 cache has; for strides that would make
            FlashAttention-4 copy a whole cache; and for gaps along a last dimension.
    """
    for name, scale_of in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale_of is not None:
            raise ValueError(f"impl 'fa4' takes no {name}: it reads caches of the query's dtype")
    _check_alignment("query", batch.query)
    _check_alignment("key_cache", batch.key_cache)
    _check_alignment("value_cache", batch.value_cache)
    _check_alignment("output", output)
    batch.check_strides("fa4", output)
    if batch.is_empty:
        return None
    if chunks is None:
        chunks = Chunks.cut(batch, window_left)
    attend_chunks(batch, chunks, output=output, scale=scale, softcap=softcap, forward=forward)
    return chunks


def attend_chunks(
    batch: Batch,
    chunks: Chunks,  # of the batch
    *,
    output: torch.Tensor,  # [T, Hq, D]
    scale: float,
    softcap: float,
    forward: Forward | None = None,  # None: that of the package flash-attn-4
) -> None:
    """Writes attention's result to `output`, by running FlashAttention-4 with each chunk as a
    request."""
    mask, tensors = band_mask, [chunks.bands]
    if chunks.images is not None:
        mask, tensors = image_mask, [chunks.bands, chunks.images]
    (forward or _package_forward)(
        q=batch.query,
        k=batch.key_cache,
        v=batch.value_cache,
        out=output,
        cu_seqlens_q=chunks.query_start_loc,
        seqused_k=chunks.seq_lens,
        block_table=chunks.block_table,
        max_seqlen_q=CHUNK,  # constant, because it is part of the compile key
        max_seqlen_k=chunks.block_table.shape[1] * batch.key_cache.shape[1],
        softmax_scale=scale,
        softcap=softcap,
        mask_mod=mask,
        aux_tensors=tensors,
        # A chunk's keys are few. On an H200, a canvas behind 1,024 tokens takes 42 us, and 51 with
        # its keys in four shares. Whether there are several is also part of the compile key.
        num_splits=1,
    )


def _package_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_table: torch.Tensor, **options: Any
) -> None:
    """Runs the package's private function, because its public one takes no `out`."""
    from flash_attn.cute.interface import _flash_attn_fwd

    _flash_attn_fwd(q, k, v, page_table=block_table, **options)


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if vectorised loads cannot read the tensor's strides or address."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    if tensor.stride(-1) != 1 or any(n % _ALIGNMENT for n in (tensor.data_ptr(), *strides)):
        raise ValueError(
            f"impl 'fa4' takes a {name} that is contiguous along its last dimension, with an "
            f"address and other strides that are multiples of {_ALIGNMENT} bytes, got strides "
            f"{strides} bytes and {tensor.stride(-1)} elements at address {tensor.data_ptr():#x}"
        )
