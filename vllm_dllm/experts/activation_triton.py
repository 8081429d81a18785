"""What is before an expert's products in FP8: quantisation of the rows, and between the products
activation and quantisation in one launch.

Between the products vLLM launches two kernels, the second of which needs four times as long as its
bytes (an H200, 32,768 rows of 704 channels: 37 and 106 us), and the same kernel before them three
times as long (4,096 rows of 2,816: 28 us). Here a program computes a row: it needs the largest
element before it can quantise, and keeps the row in registers until then.
"""

import torch
import triton
import triton.language as tl

from vllm_dllm.experts.definition import FP8, MOST, SMALLEST_SCALE

_MOST, _SMALLEST_SCALE = tl.constexpr(MOST), tl.constexpr(SMALLEST_SCALE)


def activate_and_quantise(
    products: torch.Tensor,  # [R, 2 * N] the model's type: gate's channels, then up's
    quantised: torch.Tensor,  # [R, N] e4m3; overwritten
    scale: torch.Tensor,  # [R, 1] fp32; overwritten
    activation: str,  # of `definition.ACTIVATIONS`
) -> None:
    """Writes what `definition.quantise` makes of `activation(gate) * up`, which is rounded to the
    model's type before. All tensors are contiguous and on one device."""
    rows, width = quantised.shape
    block = triton.next_power_of_2(width)
    _activate_and_quantise_kernel[(rows,)](
        products, quantised, scale, N=width, BLOCK=block, IS_GELU=activation == "gelu_tanh",
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


def quantise_rows(
    rows: torch.Tensor,  # [n, K] the model's type, contiguous
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `definition.quantise` does, rows in e4m3 [n, K] and their scales [n, 1] fp32: in
    bf16 and fp16 the same numbers, as vLLM's kernel also does, but a zero never has a sign. A row
    with a NaN or an infinity has a NaN somewhere, so its products are NaN."""
    width, block = rows.shape[1], triton.next_power_of_2(rows.shape[1])
    quantised = torch.empty_like(rows, dtype=FP8)
    scale = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
    _quantise_rows_kernel[(len(rows),)](
        rows, quantised, scale, K=width, BLOCK=block, num_warps=max(1, min(8, block // 1024))
    )
    return quantised, scale


@triton.jit
def activated(gate, up, IS_GELU: tl.constexpr):
    """Returns `activation(gate) * up` in fp32, for SiLU or GELU by tanh."""
    opening = gate
    if IS_GELU:  # x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y), here y = sqrt(2 / pi) * ...
        opening = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(opening) * up


@triton.jit
def _activate_and_quantise_kernel(
    products,  # [R, 2 * N]
    quantised,  # [R, N]
    scale,  # [R] fp32
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    is_channel = channel < N
    of_gate = products + row * 2 * N + channel
    gate = tl.load(of_gate, mask=is_channel, other=0.0).to(tl.float32)
    up = tl.load(of_gate + N, mask=is_channel, other=0.0).to(tl.float32)
    value = activated(gate, up, IS_GELU).to(products.dtype.element_ty).to(tl.float32)
    found = tl.maximum(tl.max(tl.abs(value)) / _MOST, _SMALLEST_SCALE)
    tl.store(scale + row, found)
    # None is beyond the largest number, as none is beyond the row's own.
    written = (value * (1 / found)).to(quantised.dtype.element_ty)
    tl.store(quantised + row * N + channel, written, mask=is_channel)


@triton.jit
def _quantise_rows_kernel(
    rows,  # [n, K]
    quantised,  # [n, K]
    scale,  # [n] fp32
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    is_channel = channel < K
    value = tl.load(rows + row * K + channel, mask=is_channel, other=0.0).to(tl.float32)
    found = tl.maximum(tl.div_rn(tl.max(tl.abs(value)), _MOST), _SMALLEST_SCALE)
    tl.store(scale + row, found)
    # A product by the inverse would round one number of 10,000 to the other side of a tie. What it
    # leaves makes it the quotient, in fewer instructions than a division of each.
    inverse = tl.div_rn(1.0, found)
    about = value * inverse
    quotient = tl.fma(tl.fma(-about, found, value), inverse, about)
    written = quotient.to(quantised.dtype.element_ty)
    tl.store(quantised + row * K + channel, written, mask=is_channel)
