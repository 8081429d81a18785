"""NVFP4 in plain PyTorch: e2m1 values, an e4m3 scale per 16 values, one global scale.

vLLM has an emulation of its own, which rounds the operands to the model's type. This one multiplies
values and block scales, a product of six bits, before it applies the global scales, as GPUs do. It
is also faster (docs/quantised.md).
"""

import torch
from torch.nn import functional as F

from vllm_dllm.cpu.quantization import fp8
from vllm_dllm.cpu.quantization.scaled import Scaled
from vllm_dllm.quantization.schemes import GROUP_SIZE

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of the codes 0 to 7; bit 3 is the sign
E2M1_MAX = 6.0
E4M3_MAX = 448.0


def _pairs() -> torch.Tensor:
    """Gives the two fp32 values of each byte, low nibble first, as one 64-bit element: [256]."""
    # dtype and device are given because modules are imported while a model is being built.
    values = torch.tensor([*E2M1, *(-m for m in E2M1)], dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.float64)[:, 0]


_PAIRS = _pairs()
_EXPONENT = 0x7F800000  # of fp32: what is left is the power of two below


def decode(
    packed: torch.Tensor,  # [N, K / 2] uint8
    block_scale: torch.Tensor,  # [N, K / 16] float8_e4m3fn
    scale: torch.Tensor,  # [] fp32, multiplies
) -> Scaled:
    pairs = _PAIRS.index_select(0, packed.flatten().int()).view(torch.float32)
    blocks = pairs.view(*block_scale.shape, GROUP_SIZE).mul_(fp8.values(block_scale)[..., None])
    return Scaled(blocks.flatten(-2), scale)


def quantize(
    x: torch.Tensor,  # [n, K]
    global_scale: torch.Tensor,  # [] fp32, 448 * 6 / the largest magnitude expected; divides
) -> Scaled:
    """Scales each 16 values of a row so that their largest magnitude becomes e2m1's largest, and
    rounds to the nearest value, ties to the even code."""
    x = x.float()
    amax = F.max_pool1d(x.abs(), GROUP_SIZE)[..., None]  # faster than a reduction of 16
    blocks = x.unflatten(-1, (-1, GROUP_SIZE))
    scale = fp8.values((global_scale * (amax / E2M1_MAX)).clamp_(max=E4M3_MAX).to(fp8.FP8))
    values = blocks * torch.where(scale == 0, 0, global_scale / scale)
    values = round_to_e2m1(values.clamp_(-E2M1_MAX, E2M1_MAX))
    return Scaled(values.mul_(scale).flatten(-2), 1 / global_scale)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Rounds magnitudes up to 6, fp32. Between powers of two, e2m1 has one value; below 1, steps of
    0.5.

    fp32 has steps of `size / 2` next to `1.5 * 2**22 * size`, and rounds to them when it adds, ties
    to the even one, which has the even code.
    """
    size = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=1)
    size.mul_(1.5 * 2**22)
    return (values + size).sub_(size)
