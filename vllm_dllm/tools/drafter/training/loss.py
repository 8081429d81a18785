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
    anchors: list[list[int]],
    widths: list[list[int]],
) -> tuple[Tensor, float]:
    """Weighted cross entropy of the masked slots, and the mean number of right guesses before the
    first wrong one."""
    device = target.device
    tokens = pad(rows, device)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
    block_size = drafter.config.block_size
    blocks = make_blocks(
        tokens,
        lengths,
        torch.tensor(anchors, device=device),
        torch.tensor(widths, device=device),
        block_size,
        drafter.mask_token_id,
    )
    states, _ = target.states(tokens, drafter.target_layer_ids)
    logits = block_logits(drafter, target, states, blocks)
    slot = torch.arange(block_size, device=device).repeat(blocks.wanted.shape[1] // block_size)
    decay = block_size * 7 / 16  # γ: 7 for blocks of 16, as in the paper
    weight = torch.exp(-(slot - 1) / decay) * (blocks.wanted >= 0)
    losses = F.cross_entropy(
        logits.flatten(0, 1), blocks.wanted.flatten(), ignore_index=-1, reduction="none"
    )
    loss = (losses * weight.flatten()).sum() / weight.sum()
    right = (logits.detach().argmax(-1) == blocks.wanted).unflatten(1, (-1, block_size))
    is_block = (blocks.wanted >= 0).unflatten(1, (-1, block_size)).any(-1)
    counts = right[..., 1:].int().cumprod(-1).sum(-1)[is_block]
    return loss, counts.float().mean().item()
