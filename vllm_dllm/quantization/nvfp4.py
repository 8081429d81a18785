"""NVFP4 in plain PyTorch: e2m1 values, an e4m3 scale per 16 values, one global scale.

vLLM has an emulation of its own, which rounds the operands to the model's type. This one multiplies
values and block scales, a product of six bits, before it applies the global scales, as GPUs do. It
is also faster: unpacking weights of 1408 x 2816 takes 20 ms instead of 177, rounding inputs of 256
x 2816 takes 99 ms instead of 248 (medians of ten, two cores).
"""

import torch

from vllm_dllm.quantization.nvfp4_format import E2M1, E2M1_MAX, E4M3_MAX, GROUP_SIZE
from vllm_dllm.quantization.scaled import Scaled


def _pairs() -> torch.Tensor:
    """The two fp32 values of each byte, low nibble first, as one 64-bit element: [256]."""
    # dtype and device are given because modules are imported while a model is being built.
    values = torch.tensor([*E2M1, *(-m for m in E2M1)], dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.float64)[:, 0]


_PAIRS = _pairs()


def decode(
    packed: torch.Tensor,  # [N, K / 2] uint8
    block_scale: torch.Tensor,  # [N, K / 16] float8_e4m3fn
    scale: torch.Tensor,  # [] fp32, multiplies
) -> Scaled:
    pairs = _PAIRS.index_select(0, packed.flatten().int()).view(torch.float32)
    blocks = pairs.view(*block_scale.shape, GROUP_SIZE).mul_(block_scale.float()[..., None])
    return Scaled(blocks.flatten(-2), scale)


def quantize(
    x: torch.Tensor,  # [n, K]
    global_scale: torch.Tensor,  # [] fp32, 448 * 6 / the largest magnitude expected; divides
) -> Scaled:
    """Scales each 16 values of a row so that their largest magnitude becomes e2m1's largest, and
    rounds to the nearest value, ties to the even code."""
    blocks = x.float().unflatten(-1, (-1, GROUP_SIZE))
    scale = global_scale * (blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX)
    scale = scale.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    values = blocks * torch.where(scale == 0, 0, global_scale / scale)
    magnitude = values.clamp_(-E2M1_MAX, E2M1_MAX).abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    values.div_(spacing).round_().mul_(spacing)
    return Scaled(values.mul_(scale).flatten(-2), 1 / global_scale)
