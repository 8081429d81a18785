"""Attention of canvases over the keys that all of their rows see, as two products."""

import torch

from vllm_dllm.cpu.attention.layout import CanvasKeys
from vllm_dllm.cpu.compat.ops import write_cpu_kv_cache


def attend_canvases(
    query: torch.Tensor,  # [T, Hq, D]
    kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * D]
    canvas_keys: CanvasKeys,
    scale: float,
    output: torch.Tensor,  # [T, Hq, D], written at the canvases' rows
    softcap: float = 0.0,  # scores become softcap * tanh(score / softcap); 0 = none
) -> None:
    """Attention of the rows of a layout over the keys they see."""
    layout = canvas_keys.layout
    n, Q = len(layout.selected), layout.query_len
    Hq, D = query.shape[1:]
    keys, values = _gather_blocks(kv_cache, canvas_keys.blocks, layout.keys)
    Hkv = keys.shape[1]
    # The heads of a group share their keys, and the mask does not depend on the row: fold the
    # group's heads into the row axis.
    own = query[: n * Q] if layout.rows is None else query[layout.rows]
    grouped = own.view(n, Q, Hkv, Hq // Hkv, D).permute(0, 2, 3, 1, 4)
    # fp32, as in vLLM's kernel: rounding scores to bf16 changes rows by up to 2%.
    scores = torch.matmul(grouped.reshape(n, Hkv, -1, D).float() * scale, keys.float())
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if layout.bias is not None:
        scores.view(n, Hkv, Hq // Hkv, Q, -1).add_(layout.bias)
    probs = torch.softmax(scores, dim=-1).to(values.dtype)
    attended = torch.matmul(probs, values).view(n, Hkv, Hq // Hkv, Q, D)
    by_row = attended.permute(0, 3, 1, 2, 4)
    if layout.rows is None:
        output[: n * Q].view(n, Q, Hkv, Hq // Hkv, D).copy_(by_row)
    else:
        flat_rows = layout.rows.view(-1)[layout.valid_rows]
        output[flat_rows] = by_row.reshape(n * Q, Hq, D)[layout.valid_rows]


def _gather_blocks(
    kv_cache: torch.Tensor,  # [num_blocks, Hkv, block_size, 2 * D]
    blocks: torch.Tensor,  # [n, B] int64
    positions: slice,  # K positions, counted from the first block's
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transposed keys [n, Hkv, D, K] and values [n, Hkv, K, D].

    For each block and head the kernel stores the keys transposed, then the values as they are.
    """
    num_blocks, Hkv, block_size, width = kv_cache.shape
    D = width // 2
    n, B = blocks.shape
    keys = kv_cache.view(num_blocks, Hkv, 2, D, block_size)[:, :, 0][blocks]
    values = kv_cache.view(num_blocks, Hkv, 2, block_size, D)[:, :, 1][blocks]
    return (
        keys.permute(0, 2, 3, 1, 4).reshape(n, Hkv, D, B * block_size)[..., positions],
        values.permute(0, 2, 1, 3, 4).reshape(n, Hkv, B * block_size, D)[:, :, positions],
    )


def check_cache_layout(isa: str, dtype: torch.dtype, kv_cache_dtype: str, block_size: int) -> None:
    """Writes one block as vLLM does and reads it back as `_gather_blocks` does.

    Raises:
        ValueError: this processor's kernels lay the cache out differently.
    """
    Hkv, D = 2, 64
    if kv_cache_dtype == "auto":
        cache = torch.zeros(1, Hkv, block_size, 2 * D, dtype=dtype)
        halves = cache.view(1, Hkv, 2 * block_size, D).chunk(2, dim=2)
        keys = torch.arange(block_size * Hkv * D).remainder(251).to(dtype)
        keys = keys.view(block_size, Hkv, D)
        slots = torch.arange(block_size)
        write_cpu_kv_cache(
            keys, -keys, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        read_keys, read_values = _gather_blocks(
            cache, torch.zeros(1, 1, dtype=torch.int64), slice(0, block_size)
        )
        if torch.equal(read_keys[0].permute(2, 0, 1), keys) and torch.equal(
            read_values[0].transpose(0, 1), -keys
        ):
            return
    raise ValueError(
        f"The reference window rule on CPU needs a KV cache with transposed keys per block, which "
        f"kv_cache_dtype={kv_cache_dtype!r} with the {isa!r} kernels does not have. Serve with "
        f"--kv-cache-dtype auto."
    )
