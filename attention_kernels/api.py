"""Paged variable-length attention with a causal flag per request and one- or two-sided windows."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Literal

import torch

from attention_kernels.batch import Batch
from attention_kernels.support import FP8, Case, fa4_reason, triton_reason

Impl = Literal["triton", "fa4", "reference"]
WindowRule = Literal["reference", "symmetric"]


def attention(
    query: torch.Tensor,  # [T, Hq, D] fp16, bf16 or fp32, the queries of all requests in turn
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D], query's dtype or fp8 e4m3
    value_cache: torch.Tensor,  # like key_cache
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32, page of each block of a request
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32, first row of each request
    seq_lens: torch.Tensor,  # [num_reqs] int32, context and queries together
    causal: torch.Tensor,  # [num_reqs] int32, 1 = causal, 0 = bidirectional, B = by blocks, -B =
    # verifies a block
    *,
    scale: float,  # of the scores, before the soft cap
    window_left: int = -1,  # tokens a query sees back, not counting itself; negative = no window
    window_rule: WindowRule | torch.Tensor = "reference",  # or [num_reqs] int32, 1 = symmetric
    spans: torch.Tensor | None = None,  # [T, 2] int32, keys of each query's image; None: no images
    softcap: float = 0.0,  # scores become `softcap * tanh(score / softcap)`; 0 = none
    key_scale: torch.Tensor | None = None,  # [1] fp32, what an fp8 cache is multiplied by; None = 1
    value_scale: torch.Tensor | None = None,
    max_seq_len: int | None = None,  # bound on seq_lens (None = the block table's)
    verifies: bool = False,  # whether `causal` may be negative
    output: torch.Tensor | None = None,  # [T, Hq, D], written at the rows of requests
    impl: Impl = "triton",
) -> torch.Tensor:
    """Returns attention's output [T, Hq, D] in the query's dtype. `masks.py` defines who sees whom.

    The cache must already hold the queries' own keys and values. A query that sees no key gives
    zeros. Except in "reference", nothing waits for the device or depends on values there. So a call
    can be captured in a CUDA graph, after a first one, and replayed when the tensors have changed.

    impl: "triton" (a GPU, or Triton's interpreter), "fa4" (FlashAttention-4, a GPU) or "reference"
    (plain PyTorch, anywhere). A case that `impl` cannot run is an error: no other implementation
    takes over, and `support.py` tells beforehand. "fa4" takes only 0 and 1 in `causal`, and
    negative numbers with `masks.verifying_spans`. It may read a sequence's last page to its end,
    which must then be finite. `max_seq_len` only steers how
    the work is split. With `output` None, the new tensor is zero outside the rows of requests.

    spans: for each query the first position and the end of the image that its token belongs to,
    (0, 0) if it belongs to none. The image must hold the query and end within its request. With a
    window, "fa4" takes no image that starts before what the request's first query sees.

    Raises:
        ValueError: names the argument, what was expected and what was passed.
        ImportError: a package of `impl` is missing; says which.
        RuntimeError: "triton" splits keys for the first time while a CUDA graph is captured.
    """
    symmetric = window_rule
    if isinstance(symmetric, str):
        symmetric = torch.full_like(causal, int(window_rule == "symmetric"))
    batch = Batch(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        causal=causal,
        symmetric=symmetric,
        spans=spans,
    )
    _check_tensors(batch, key_scale, value_scale, output)
    _check_options(batch, softcap, window_rule)
    longest = block_table.shape[1] * key_cache.shape[1]
    longest = longest if max_seq_len is None else min(max_seq_len, longest)
    run = _find_implementation(impl, batch, longest, verifies)
    if output is None:
        output = query.new_zeros(query.shape)
    run(
        batch,
        output=output,
        scale=scale,
        window_left=window_left,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return output


def _check_tensors(
    batch: Batch,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    output: torch.Tensor | None,
) -> None:
    """Raises ValueError if a tensor has another shape, dtype or device than `attention` asks
    for."""
    num_tokens, num_heads, head_size = _checked_shape("query", batch.query, 3)
    num_blocks, block_size, num_kv_heads, _ = _checked_shape("key_cache", batch.key_cache, 4)
    num_reqs, max_blocks = _checked_shape("block_table", batch.block_table, 2)
    cache_shape = (num_blocks, block_size, num_kv_heads, head_size)
    cache_dtype = batch.key_cache.dtype
    expected: tuple[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype], ...] = (
        ("key_cache", batch.key_cache, cache_shape, cache_dtype),  # dtype: `_check_options`
        ("value_cache", batch.value_cache, cache_shape, cache_dtype),
        ("block_table", batch.block_table, (num_reqs, max_blocks), torch.int32),
        ("query_start_loc", batch.query_start_loc, (num_reqs + 1,), torch.int32),
        ("seq_lens", batch.seq_lens, (num_reqs,), torch.int32),
        ("causal", batch.causal, (num_reqs,), torch.int32),
        ("window_rule", batch.symmetric, (num_reqs,), torch.int32),
        ("spans", batch.spans, (num_tokens, 2), torch.int32),
        ("key_scale", key_scale, (1,), torch.float32),
        ("value_scale", value_scale, (1,), torch.float32),
        ("output", output, (num_tokens, num_heads, head_size), batch.query.dtype),
    )
    for name, tensor, shape, dtype in expected:
        if tensor is not None:
            _expect(name, "shape", shape, tuple(tensor.shape))
            _expect(name, "dtype", dtype, tensor.dtype)
            _expect(name, "query's device", batch.query.device, tensor.device)


def _check_options(batch: Batch, softcap: float, window_rule: WindowRule | torch.Tensor) -> None:
    """Raises ValueError for dtypes, heads and options that no implementation supports."""
    query, key_cache = batch.query, batch.key_cache
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query must be float16, bfloat16 or float32, got {query.dtype}")
    if key_cache.dtype not in (query.dtype, FP8):
        raise ValueError(
            f"key_cache must have the query's dtype {query.dtype} or {FP8}, got {key_cache.dtype}"
        )
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"query has {num_heads} heads, which is not a multiple of key_cache's {num_kv_heads}"
        )
    if softcap < 0:
        raise ValueError(f"softcap must be at least 0 (none), got {softcap}")
    if isinstance(window_rule, str) and window_rule not in ("reference", "symmetric"):
        raise ValueError(
            f"window_rule must be 'reference', 'symmetric' or a tensor, got {window_rule!r}"
        )


def _find_implementation(
    impl: Impl, batch: Batch, max_seq_len: int, verifies: bool
) -> Callable[..., object]:
    """Returns the function that `impl` names. Raises ValueError if it does not support this case,
    and ImportError if its package is missing."""
    if impl == "reference":
        from attention_kernels import reference

        return reference.attention
    if impl not in ("triton", "fa4"):
        raise ValueError(f"impl must be 'triton', 'fa4' or 'reference', got {impl!r}")
    query, on_gpu = batch.query, batch.query.device.type == "cuda"
    if impl == "fa4" and not on_gpu:
        raise ValueError(
            f"impl 'fa4' takes tensors on a GPU, got query on {query.device}: move all tensors to "
            f"a GPU, or pass impl='reference', which runs anywhere"
        )
    # Without a GPU, Triton's interpreter stands in for Hopper.
    capability = torch.cuda.get_device_capability(query.device) if on_gpu else (9, 0)
    case = Case(capability, query.shape[-1], query.dtype, batch.key_cache.dtype)
    if reason := (triton_reason if impl == "triton" else fa4_reason)(case):
        raise ValueError(f"impl {impl!r} takes {reason}")
    if impl == "fa4":
        return import_fa4().attention
    from attention_kernels import triton_fwd

    return partial(triton_fwd.attention, max_seq_len=max_seq_len, verifies=verifies)


def import_fa4() -> ModuleType:
    """Returns the module `fa4_fwd`. Raises ImportError, which says what to install, if the package
    flash-attn-4 is missing."""
    try:
        importlib.import_module("flash_attn.cute.interface")
        return importlib.import_module("attention_kernels.fa4_fwd")
    except ImportError as error:
        raise ImportError(
            f"FlashAttention-4 needs the package flash-attn-4 ({error}). Install the extra fa4 "
            f"(pip install 'vllm-dllm[fa4]') or leave out FlashAttention-4."
        ) from error


def _checked_shape(name: str, tensor: torch.Tensor, dims: int) -> tuple[int, ...]:
    """Returns the tensor's shape. Raises ValueError unless it has `dims` dimensions."""
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    return tuple(tensor.shape)


def _expect(name: str, what: str, expected: object, got: object) -> None:
    """Raises ValueError unless `got`, the `what` of the argument `name`, is the expected one."""
    if expected != got:
        raise ValueError(f"{name} must have {what} {expected}, got {got}")
