"""The loss of a step: cross entropy of the tokens the target wrote after the anchors.

The first wrong guess ends a draft, so tokens near the anchor weigh more: exp(-(k - 1) / γ), as in
the paper (arXiv:2602.06036).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dllm.tools.drafter.training.blocks import KnownSequence, block_logits, make_blocks, pad
from vllm_dllm.tools.drafter.training.reference import DFlashDrafter
from vllm_dllm.tools.drafter.training.target_states import Target


def drafting_loss(
    drafter: DFlashDrafter,
    target: Target,
    rows: list[KnownSequence],
    anchors: list[list[int]],  # [B][N], -1: no block
    widths: list[list[int]],  # [B][N], slots of each block
) -> Tensor:
    """Gives the weighted mean over the masked slots, [] float32, in nats."""
    block_size = drafter.config.block_size
    tokens = pad(rows, target.device)
    lengths, starts, slots = (
        torch.tensor(values, device=target.device)
        for values in ([len(row.tokens) for row in rows], anchors, widths)
    )
    blocks = make_blocks(tokens, lengths, starts, slots, block_size, drafter.mask_token_id)
    states, _ = target.states(tokens, drafter.target_layer_ids)
    logits = block_logits(drafter, target, states, blocks)
    slot = torch.arange(block_size, device=target.device).repeat(starts.shape[1])
    decay = block_size * 7 / 16  # γ: 7 for blocks of 16, as in the paper
    weight = torch.exp(-(slot - 1) / decay) * (blocks.wanted >= 0)
    losses = F.cross_entropy(
        logits.flatten(0, 1), blocks.wanted.flatten(), ignore_index=-1, reduction="none"
    )
    return (losses * weight.flatten()).sum() / weight.sum()
