"""NVFP4 in plain PyTorch: 4-bit floats, an fp8 scale per 16 values, one fp32 scale.

    value = e2m1 * group_scale / global_scale

`global_scale` divides: it is 448 * 6 / amax, so that the largest group scale is fp8's largest
number. This file defines what the bits mean. `vllm-dllm quantize` packs with compressed-tensors
(`NVFP4PackedCompressor`), and the tests check that the two agree bit for bit.

Sources: compressed-tensors 0.17 `quantization/utils/helpers.py`, `compressors/nvfp4/`; NVIDIA,
"Introducing NVFP4 for Efficient and Accurate Low-Precision Inference".
"""

from itertools import pairwise

import torch

from vllm_dllm.cpu.quantization.formats import E2M1, E2M1_MAX, FP8_MAX
from vllm_dllm.quantization.schemes import GROUP_SIZE

# Replaces a group scale that rounds to zero; 0.125 is compressed-tensors' choice.
SMALLEST_GROUP_SCALE = 0.125


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """fp32 [1] from the largest magnitude (fp32, one value). 1 if that is zero or too small."""
    scale = FP8_MAX * E2M1_MAX / amax.float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(scale.isinf(), 1.0, scale).reshape(1)


def group_scales(
    values: torch.Tensor,  # [rows, columns] fp32, columns a multiple of 16
    scale: torch.Tensor,  # [1] fp32, the global scale
) -> torch.Tensor:
    """[rows, columns / 16] float8_e4m3fn: a group's largest magnitude becomes 6."""
    amax = values.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1)
    rounded = (amax / E2M1_MAX * scale).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    return torch.where(rounded.float() == 0, SMALLEST_GROUP_SCALE, rounded.float()).to(
        torch.float8_e4m3fn
    )


def round_to_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 (uint8) of the nearest e2m1 values; ties go to the even code."""
    magnitude = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for lower, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        code += magnitude > middle if lower % 2 == 0 else magnitude >= middle
    return code + 8 * (scaled < 0).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[rows, columns] codes -> [rows, columns / 2] uint8, the even column in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns / 2] uint8 -> [rows, columns] fp32 e2m1 values."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    magnitude = torch.tensor(E2M1, device=packed.device)[(codes & 7).long()]
    return torch.where(codes > 7, -magnitude, magnitude)


def quantize(
    values: torch.Tensor,  # [rows, columns], columns a multiple of 16
    scale: torch.Tensor,  # [1] fp32, the global scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [rows, columns / 2] uint8 and group scales [rows, columns / 16] fp8."""
    values = values.float()
    groups = group_scales(values, scale)
    steps = (groups.float() / scale).repeat_interleave(GROUP_SIZE, dim=-1)
    return pack(round_to_e2m1(values / steps)), groups


def dequantize(
    packed: torch.Tensor,  # [rows, columns / 2] uint8
    groups: torch.Tensor,  # [rows, columns / 16] float8_e4m3fn
    scale: torch.Tensor,  # [1] fp32
) -> torch.Tensor:
    """[rows, columns] fp32."""
    steps = (groups.float() / scale).repeat_interleave(GROUP_SIZE, dim=-1)
    return unpack(packed) * steps


def error_bound(
    values: torch.Tensor,  # [rows, columns] fp32
    groups: torch.Tensor,  # [rows, columns / 16] float8_e4m3fn
    scale: torch.Tensor,  # [1] fp32
) -> torch.Tensor:
    """[rows, columns] fp32, the largest |dequantised - value| that rounding allows.

    In units of a group's step S, neighbouring e2m1 values are 0.5 apart up to 2, 1 apart up to 4
    and 2 apart up to 6, so rounding changes a value by at most 0.25, 0.5 and 1. Values beyond 6 are
    cut off: the group scale itself is rounded, by at most 1/16 unless it is below fp8's normal
    numbers, so the largest value of a group can be 6 / (1 - 1/16) = 6.4.
    """
    steps = (groups.float() / scale).repeat_interleave(GROUP_SIZE, dim=-1)
    size = values.abs() / steps
    half_gap = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
    return torch.maximum(half_gap, size - E2M1_MAX) * steps
