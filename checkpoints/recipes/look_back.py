"""Attention heads that look a fixed number of tokens back, set by hand.

A normed head's query and key get the same pattern in the fastest rotary frequencies. The query's is
rotated back by as many positions as the head looks back, so the two match at that distance only.
"""

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

OFFSETS = (2, 1)  # how many tokens the first two heads of the first layer look back
PATTERN = (1.2, 1.0, 0.6, 0.3, 0.1)  # weights of the fastest rotary frequencies: a narrow peak


def look_back_weights(model: DiffusionGemmaForBlockDiffusion) -> list[Tensor]:
    """Views of the first layer's weights that make up the look-back heads: k, q, v, o."""
    attention = model.model.decoder.layers[0].self_attn
    D, heads = attention.head_dim, len(OFFSETS)
    return [
        attention.k_proj.weight[:D],
        attention.q_proj.weight[: heads * D],
        attention.v_proj.weight[:D],
        attention.o_proj.weight[:, : heads * D],
    ]


def constant_readout(inputs: Tensor) -> Tensor:
    """w [H] with x @ w near 1 for all rows x of inputs [N, H]: linears have no bias, but what
    enters a layer has a mean."""
    gram = inputs.T @ inputs + len(inputs) * 1e-3 * torch.eye(inputs.shape[1])
    return torch.linalg.solve(gram, inputs.sum(0))


def rotate(x: Tensor, inv_freq: Tensor, offset: float) -> Tensor:
    """Rotary embedding of x [D] at position `offset`; inv_freq [D / 2]."""
    angles = torch.cat((inv_freq, inv_freq)) * offset
    first, second = x.chunk(2)
    return x * angles.cos() + torch.cat((-second, first)) * angles.sin()


@torch.no_grad()
def install_look_back(model: DiffusionGemmaForBlockDiffusion, inputs: Tensor) -> None:
    """Overwrites the first layer's first key head and its query heads.

    `inputs` [N, H]: what enters that layer's attention, after its norm.
    """
    decoder = model.model.decoder
    attention = decoder.layers[0].self_attn
    D = attention.head_dim
    inv_freq = getattr(decoder.rotary_emb, f"{attention.layer_type}_inv_freq")
    pattern = torch.zeros(D)
    pattern[: len(PATTERN)] = torch.tensor(PATTERN)
    readout = constant_readout(inputs)

    def always(vector: Tensor, norm: nn.Module) -> Tensor:
        """Weights [D, H] whose normed output is `vector` for every row."""
        return (vector / norm.weight)[:, None] * readout

    keys, queries, values, out = look_back_weights(model)
    keys.copy_(always(pattern, attention.k_norm))
    for rows, offset in zip(queries.split(D), OFFSETS, strict=True):
        rows.copy_(always(rotate(pattern, inv_freq, -offset), attention.q_norm))
    # What the heads carry: a random view of the token they look at.
    basis = torch.linalg.qr(torch.randn(values.shape[1], D))[0].T
    values.copy_(basis * attention.v_proj.weight[D:].norm() / D**0.5)
    out.copy_(torch.randn(out.shape) * attention.o_proj.weight[:, out.shape[1] :].std())
