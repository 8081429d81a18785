"""4-bit integers with a scale per group of a row, as compressed-tensors packs them, in PyTorch.

    value = (code - 8) * scale

Eight codes make an int32, the first in its lowest bits. Source: compressed-tensors 0.17,
`compressors/pack_quantized/`. Inputs are not quantised.
"""

import torch


def _pairs() -> torch.Tensor:
    """Gives the two fp32 values of each byte, low half first, as one 64-bit element: [256]."""
    # dtype and device are given because modules are imported while a model is being built.
    byte = torch.arange(256, device="cpu")
    values = torch.stack(((byte & 15) - 8, (byte >> 4) - 8), dim=1)
    return values.to(torch.float32).view(torch.float64)[:, 0]


_PAIRS = _pairs()


def decode(
    packed: torch.Tensor,  # [N, K / 8] int32
    scale: torch.Tensor,  # [N, K / group], of the model's type
) -> torch.Tensor:
    """Gives [N, K] of the scale's type, whose product is rounded to it once."""
    pairs = _PAIRS.index_select(0, packed.view(torch.uint8).flatten().int()).view(torch.float32)
    groups = pairs.view(*scale.shape, -1).mul_(scale.float()[..., None])
    return groups.flatten(-2).to(scale.dtype)
