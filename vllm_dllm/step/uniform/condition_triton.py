"""`UniformStep.condition` for GPUs: three kernels around three matrix products.

The kernels read the slots in place, and round where PyTorch's operations round.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.slots import CanvasSlots

_GATED = 1024  # elements of the gate's output that a program computes


def condition(
    module: Any,  # `models.SelfConditioning`
    plain: torch.Tensor,  # [T, H] embeddings of the step's tokens
    batch: CanvasBatch,
    slots: CanvasSlots,
    out: torch.Tensor,  # [T, H], written whole
) -> None:
    """Writes the embeddings of a step's rows to `out`: self-conditioned ones for rows of canvases
    that are denoised, `plain` ones for all others."""
    n, C, H = batch.num_canvases, batch.canvas_length, plain.shape[1]
    num_rows = int(batch.lengths_np.sum())
    lanes = triton.next_power_of_2(H)
    signal = plain.new_empty(num_rows, H)
    _pre_norm_kernel[(n, C)](
        slots.soft_embeds,
        module.pre_norm.weight,
        batch.slots,
        batch.lengths,
        batch.first_rows,
        signal,
        C,
        H,
        module.pre_norm.variance_epsilon,
        LANES=lanes,
    )
    gate, up = module.gate_proj(signal), module.up_proj(signal)
    _gate_kernel[(triton.cdiv(gate.numel(), _GATED),)](gate, up, gate.numel(), BLOCK=_GATED)
    change = module.down_proj(gate)
    if batch.tokens is not None:
        out.copy_(plain)
    committing = slots.columns.is_committing
    _post_norm_kernel[(n, C)](
        plain,
        change,
        committing,
        batch.slots,
        batch.lengths,
        batch.first_rows,
        batch.first_tokens,
        out,
        committing.stride(0),
        H,
        module.post_norm.variance_epsilon,
        LANES=lanes,
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "lengths", "first_rows"])
def _pre_norm_kernel(
    soft_embeds,  # [R, C, H]
    weight,  # [H]
    slots,  # [n] int64
    lengths,
    first_rows,
    signal,  # [rows, H]
    canvas_length,
    hidden_size,
    eps,
    LANES: tl.constexpr,
):
    i, place = tl.program_id(0), tl.program_id(1)
    if place < tl.load(lengths + i):
        lane = tl.arange(0, LANES)
        is_lane = lane < hidden_size
        cell = tl.load(slots + i) * canvas_length + place
        soft = tl.load(soft_embeds + cell * hidden_size + lane, mask=is_lane, other=0.0)
        normed = _rms_norm(soft.to(tl.float32), hidden_size, eps).to(soft.dtype)
        scale = tl.load(weight + lane, mask=is_lane, other=0.0)
        row = tl.load(first_rows + i) + place
        tl.store(signal + row * hidden_size + lane, normed * scale, mask=is_lane)


@triton.jit
def _rms_norm(x, width, eps):
    """`x` fp32, zero behind `width`."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)


@triton.jit
def _gate_kernel(
    gate,  # [rows, intermediate], overwritten
    up,
    count,
    BLOCK: tl.constexpr,
):
    """`gelu(gate, approximate="tanh") * up`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < count
    opened = tl.load(gate + place, mask=is_place, other=0.0)
    x = opened.to(tl.float32)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    # tanh by way of exp, which every backend has
    e = tl.exp(tl.abs(inner) * -2)
    tanh = (1 - e) / (1 + e)
    tanh = tl.where(inner < 0, -tanh, tanh)
    gelu = (0.5 * x * (1 + tanh)).to(opened.dtype)
    tl.store(gate + place, gelu * tl.load(up + place, mask=is_place, other=0.0), mask=is_place)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("committing", "slots", "lengths", "first_rows", "first_tokens"),
    ]
)
def _post_norm_kernel(
    plain,  # [T, H]
    change,  # [rows, H]
    committing,  # [R] int64, `pitch` apart
    slots,  # [n] int64
    lengths,
    first_rows,
    first_tokens,
    out,  # [T, H]
    pitch,
    hidden_size,
    eps,
    LANES: tl.constexpr,
):
    i, place = tl.program_id(0), tl.program_id(1)
    if place < tl.load(lengths + i):
        lane = tl.arange(0, LANES)
        is_lane = lane < hidden_size
        row = tl.load(first_rows + i) + place
        token = tl.load(first_tokens + i) + place
        embedding = tl.load(plain + token * hidden_size + lane, mask=is_lane, other=0.0)
        found = embedding
        if tl.load(committing + tl.load(slots + i) * pitch) == 0:
            added = embedding + tl.load(change + row * hidden_size + lane, mask=is_lane, other=0.0)
            found = _rms_norm(added.to(tl.float32), hidden_size, eps).to(embedding.dtype)
        tl.store(out + token * hidden_size + lane, found, mask=is_lane)
