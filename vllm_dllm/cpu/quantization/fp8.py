"""FP8 (e4m3) values with one scale per row, in plain PyTorch."""

import torch

from vllm_dllm.cpu.quantization.scaled import Scaled

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
# The smallest scale in vLLM's GPU kernel, used for a row of zeros.
MIN_SCALE = 1 / (MAX * 512)
_SIGN_EXPONENT_MANTISSA = -0x8000 | 0x3F80  # as int16: bit 15, and bits 13 to 7


def quantize(x: torch.Tensor) -> Scaled:
    """Scales each row of x [n, K] so that its largest magnitude becomes e4m3's largest."""
    x = x.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / MAX).clamp_(min=MIN_SCALE)
    return Scaled(values((x / scale).clamp_(-MAX, MAX).to(FP8)), scale)


def decode(
    weight: torch.Tensor,  # [N, K] float8_e4m3fn
    scale: torch.Tensor,  # [N, 1] fp32
) -> Scaled:
    return Scaled(values(weight), scale)


def values(e4m3: torch.Tensor) -> torch.Tensor:
    """Converts to fp32, exactly, in a twentieth of the time of PyTorch, which goes one by one.

    Sign, exponent and mantissa are put where fp16 has them. fp16's exponent starts 8 lower, and its
    conversion is vectorised. NaN becomes 480: checkpoints and what is rounded here hold none.
    """
    bits = e4m3.view(torch.int8).to(torch.int16)  # the sign fills the upper half
    bits.bitwise_left_shift_(7).bitwise_and_(_SIGN_EXPONENT_MANTISSA)
    return bits.view(torch.float16).float().mul_(2**8)
