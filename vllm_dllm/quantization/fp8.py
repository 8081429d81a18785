"""FP8 (e4m3) values with one scale per row, in plain PyTorch."""

import torch

from vllm_dllm.quantization.scaled import Scaled

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
# The smallest scale in vLLM's GPU kernel, used for a row of zeros.
MIN_SCALE = 1 / (MAX * 512)


def quantize(x: torch.Tensor) -> Scaled:
    """x [n, K], each row scaled so that its largest magnitude becomes e4m3's largest."""
    x = x.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / MAX).clamp_(min=MIN_SCALE)
    return Scaled((x / scale).clamp_(-MAX, MAX).to(FP8).float(), scale)


def decode(
    weight: torch.Tensor,  # [N, K] float8_e4m3fn
    scale: torch.Tensor,  # [N, 1] fp32
) -> Scaled:
    return Scaled(weight.float(), scale)
