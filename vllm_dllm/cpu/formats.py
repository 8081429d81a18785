"""Quantised matrices in plain PyTorch, multiplied as kernels do: first the values, then their
scales.

- FP8: e4m3 values with one scale per row.
- NVFP4: e2m1 values, an e4m3 scale per 16 values, one global scale. vLLM has an emulation of its
  own, which rounds the operands to the model's type. This one multiplies values and block scales, a
  product of six bits, before it applies the global scales, as GPUs do. It is also faster
  (docs/quantised.md).
- Integers of 4 bits with a scale per group of a row: value = (code - 8) * scale. Eight codes make
  an int32, the first in its lowest bits. Source: compressed-tensors 0.17,
  `compressors/pack_quantized/`. Inputs are not quantised.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_dllm.quantization.schemes import GROUP_SIZE


class Scaled(NamedTuple):
    """The matrix `values * scale`. The values have few bits: bf16 holds them exactly, and fp32
    holds products of two of them exactly."""

    values: torch.Tensor  # [n, K] fp32 or bf16
    scale: torch.Tensor  # fp32, [n, 1], or [] for all rows

    def __getitem__(self, rows: torch.Tensor | slice) -> "Scaled":
        return Scaled(self.values[rows], self.scale[rows] if self.scale.dim() else self.scale)

    def to_model_dtype(self, dtype: torch.dtype) -> "Scaled":
        """Returns the matrix in the type that `multiply` is fastest with: bf16 if `dtype`, the
        model's, is bf16, else unchanged. Sums are fp32 either way, and a bf16 model rounds the
        result anyway."""
        is_bf16 = dtype == torch.bfloat16
        return self._replace(values=self.values.to(dtype)) if is_bf16 else self


def multiply(x: Scaled, weight: Scaled) -> torch.Tensor:
    """Returns x @ weight.T, [rows of x, rows of weight] fp32. In bf16 the sums are rounded to bf16
    before they are scaled."""
    scale = weight.scale.T if weight.scale.dim() else weight.scale
    return (x.values @ weight.values.T).float().mul_(x.scale * scale)


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# The smallest scale in vLLM's GPU kernel, used for a row of zeros.
FP8_MIN_SCALE = 1 / (FP8_MAX * 512)
_SIGN_EXPONENT_MANTISSA = -0x8000 | 0x3F80  # as int16: bit 15, and bits 13 to 7


def quantize_fp8(x: torch.Tensor) -> Scaled:
    """Returns x [n, K], rounded to e4m3 with a scale for each row that makes its largest magnitude
    the largest of e4m3."""
    x = x.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp_(min=FP8_MIN_SCALE)
    return Scaled(fp8_to_fp32((x / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)), scale)


def decode_fp8(
    weight: torch.Tensor,  # [N, K] float8_e4m3fn
    scale: torch.Tensor,  # [N, 1] fp32
) -> Scaled:
    """Returns an FP8 weight as `Scaled`, with values in fp32."""
    return Scaled(fp8_to_fp32(weight), scale)


def fp8_to_fp32(e4m3: torch.Tensor) -> torch.Tensor:
    """Returns e4m3 numbers as fp32, exactly, in a twentieth of the time of PyTorch, which converts
    one by one.

    Sign, exponent and mantissa are moved to where fp16 has them. fp16's exponent starts 8 lower,
    and its conversion is vectorised. NaN becomes 480: neither checkpoints nor values rounded here
    have any.
    """
    bits = e4m3.view(torch.int8).to(torch.int16)  # the sign fills the upper half
    bits.bitwise_left_shift_(7).bitwise_and_(_SIGN_EXPONENT_MANTISSA)
    return bits.view(torch.float16).float().mul_(2**8)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of the codes 0 to 7; bit 3 is the sign
E2M1_MAX = 6.0


def _pairs(codes: Sequence[float]) -> torch.Tensor:
    """Returns, for each byte, the two fp32 values that its nibbles encode, low nibble first. A pair
    is one 64-bit element: [256] fp64. `codes`: the values of the 16 nibbles."""
    # dtype and device are given because modules are imported while a model is being built.
    values = torch.tensor(codes, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.float64)[:, 0]


_E2M1_PAIRS = _pairs([*E2M1, *(-m for m in E2M1)])
_INT4_PAIRS = _pairs(range(-8, 8))
_EXPONENT = 0x7F800000  # of fp32: what is left is the power of two below


def decode_nvfp4(
    packed: torch.Tensor,  # [N, K / 2] uint8
    block_scale: torch.Tensor,  # [N, K / 16] float8_e4m3fn
    scale: torch.Tensor,  # [] fp32, multiplies
) -> Scaled:
    """Returns an NVFP4 weight as `Scaled`. Its values, in fp32, include the block scales."""
    pairs = _E2M1_PAIRS.index_select(0, packed.flatten().int()).view(torch.float32)
    blocks = pairs.view(*block_scale.shape, GROUP_SIZE).mul_(fp8_to_fp32(block_scale)[..., None])
    return Scaled(blocks.flatten(-2), scale)


def quantize_nvfp4(
    x: torch.Tensor,  # [n, K]
    global_scale: torch.Tensor,  # [] fp32, 448 * 6 / the largest magnitude expected; divides
) -> Scaled:
    """Returns x [n, K], rounded to NVFP4, ties to the even code. Each 16 values of a row get an
    e4m3 scale that makes their largest magnitude about e2m1's largest. The values returned are
    already multiplied by it."""
    x = x.float()
    amax = F.max_pool1d(x.abs(), GROUP_SIZE)[..., None]  # faster than a reduction of 16
    blocks = x.unflatten(-1, (-1, GROUP_SIZE))
    scale = fp8_to_fp32((global_scale * (amax / E2M1_MAX)).clamp_(max=FP8_MAX).to(FP8))
    values = blocks * torch.where(scale == 0, 0, global_scale / scale)
    values = round_to_e2m1(values.clamp_(-E2M1_MAX, E2M1_MAX))
    return Scaled(values.mul_(scale).flatten(-2), 1 / global_scale)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Returns fp32 `values` of magnitude up to 6 rounded to e2m1, ties to the even code. Between
    powers of two, e2m1 has one value; below 1, steps of 0.5.

    fp32 has steps of `size / 2` next to `1.5 * 2**22 * size`, and rounds to them when it adds, ties
    to the even one, which has the even code.
    """
    size = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=1)
    size.mul_(1.5 * 2**22)
    return (values + size).sub_(size)


def decode_int4(
    packed: torch.Tensor,  # [N, K / 8] int32
    scale: torch.Tensor,  # [N, K / group], of the model's type
) -> torch.Tensor:
    """Returns the weight [N, K] in the scale's type. Each value is rounded once, after scaling."""
    pairs = _INT4_PAIRS.index_select(0, packed.view(torch.uint8).flatten().int())
    groups = pairs.view(torch.float32).view(*scale.shape, -1).mul_(scale.float()[..., None])
    return groups.flatten(-2).to(scale.dtype)
