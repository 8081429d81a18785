"""Runs many blocks of many sequences in one forward of the drafter, and computes their loss.

A block sees the tokens before its anchor, and itself in both directions. It never sees another
block, or the tokens that it has to guess. Nothing sees the masks past the width of a narrow block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import KnownSequence


@dataclass(frozen=True)
class Blocks:
    """The input of one forward: B sequences with N blocks each, and W slots per block. Q = N · W,
    and T is the length of the longest sequence in tokens."""

    tokens: Tensor  # [B, Q] int64, of each block: anchor, mask, mask, …
    positions: Tensor  # [B, Q] int64
    wanted: Tensor  # [B, Q] int64, the token that each slot has to guess; -1: none
    visible: Tensor  # [B, Q, T + Q] bool, the tokens and slots that each slot sees


def pad_sequences(sequences: Sequence[KnownSequence], device: torch.device) -> Tensor:
    """Returns the sequences' tokens [B, T] int64 on `device`, padded on the right with 0."""
    length = max(len(sequence.tokens) for sequence in sequences)
    rows = [sequence.tokens + [0] * (length - len(sequence.tokens)) for sequence in sequences]
    return torch.tensor(rows, device=device)


def make_blocks(
    tokens: Tensor,  # [B, T] int64, right-padded
    lengths: Tensor,  # [B] int64, tokens without padding
    anchors: Tensor,  # [B, N] int64, index of each block's anchor in `tokens`; -1: no block
    widths: Tensor,  # [B, N] int64, slots of each block, anchor included; 1 to W
    block_size: int,  # W
    mask_token_id: int,
) -> Blocks:
    """Returns the blocks of a batch: anchors with masks after them, the tokens to guess there, and
    which tokens and slots each slot sees."""
    num_rows, num_tokens = tokens.shape
    device = tokens.device
    slot = torch.arange(block_size, device=device)
    positions = (anchors[..., None] + slot).clamp(min=0)  # [B, N, W]
    in_block = (slot < widths[..., None]) & (anchors[..., None] >= 0)
    is_known = in_block & (slot > 0) & (positions < lengths[:, None, None])
    at_slot = tokens.gather(1, positions.flatten(1).clamp(max=num_tokens - 1)).view_as(positions)
    wanted = torch.where(is_known, at_slot, -1)
    block_tokens = torch.where(slot == 0, at_slot, mask_token_id)

    num_blocks = anchors.shape[1]
    before_anchor = torch.arange(num_tokens, device=device) < anchors[..., None]  # [B, N, T]
    same_block = torch.eye(num_blocks, dtype=torch.bool, device=device)
    # [B, N, 1, N, W]: a slot past the width also sees the block, so that no softmax is empty.
    in_width = (slot < widths[..., None])[:, None, None]
    seen = same_block[None, :, None, :, None] & in_width
    num_queries = num_blocks * block_size
    visible = torch.cat(
        (
            before_anchor.repeat_interleave(block_size, dim=1),
            seen.expand(-1, -1, block_size, -1, -1).reshape(num_rows, num_queries, num_queries),
        ),
        dim=-1,
    )
    return Blocks(block_tokens.flatten(1), positions.flatten(1), wanted.flatten(1), visible)


def block_logits(
    drafter: DFlashDrafter,
    target: Target,
    states: Tensor,  # [B, T, layers · H] of the whole sequences
    blocks: Blocks,
) -> Tensor:
    """Returns the drafter's logits [B, Q, V] fp32 at all slots of the blocks."""
    dtype = drafter.fc.weight.dtype
    positions = torch.arange(states.shape[1], device=states.device).expand(states.shape[:2])
    context = drafter.context_kv(states.to(dtype), positions)
    embeddings = target.embed(blocks.tokens).to(dtype)
    hidden = drafter(embeddings, blocks.positions, context, blocks.visible)
    return target.logits(hidden.to(target.model.dtype)).float()


def drafting_loss(
    drafter: DFlashDrafter,
    target: Target,
    rows: list[KnownSequence],
    anchors: list[list[int]],  # [B][N], indices of the blocks' anchors; -1: no block
    widths: list[list[int]],  # [B][N], slots of each block, anchor included
) -> Tensor:
    """Returns the weighted mean of the cross entropies of the masked slots, [] fp32, in nats.

    The first wrong guess ends a draft. So slot k after the anchor has the weight exp(-(k - 1) / γ),
    as in the paper (arXiv:2602.06036).
    """
    block_size = drafter.config.block_size
    tokens = pad_sequences(rows, target.device)
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
