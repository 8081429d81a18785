"""Computes offline how many tokens every verification of speculative decoding would emit.

Greedy speculative decoding is lossless, so the tokens are those of the target alone, whatever the
drafter does. They are generated once. One forward of the target gives the states of all of them.
For one draft width, one pass of the drafter guesses a block after every token. What remains is to
walk from anchor to anchor, for each verify width.

A width counts drafted tokens: vLLM's `num_speculative_tokens`. The block has one slot more, the
anchor. τ is the mean number of tokens that a verification emits. The bonus token counts. Tokens
past EOS or `max_tokens` do not count. The first token of an answer comes from the prefill, not from
a verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dllm.drafters.layout import check_drafter
from vllm_dllm.tools.drafter.blocks import block_logits, make_blocks, pad_sequences
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import KnownSequence

ANCHORS_PER_FORWARD = 64  # of each sequence, in a forward of the drafter
ROWS_PER_FORWARD = 16  # sequences


@dataclass(frozen=True)
class Replayed:
    """A prompt's answer, and how many of its tokens a draft after each of its tokens guesses."""

    answer: list[int]
    first_logits: Tensor  # [V] fp32 on the CPU, from which the first token is chosen
    matches: list[int]
    """For each answer token but the last: the number of drafted tokens after it that are right, up
    to the first wrong one."""

    def emitted_lengths(self, verify_width: int) -> list[int]:
        """Returns the number of tokens that each verification emits, if it verifies the first
        `verify_width` drafted tokens."""
        lengths: list[int] = []
        anchor, last = 0, len(self.answer) - 1
        while anchor < last:
            emitted = min(min(self.matches[anchor], verify_width) + 1, last - anchor)
            lengths.append(emitted)
            anchor += emitted
        return lengths


@torch.no_grad()
def replay(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],  # the target's greedy tokens of each prompt, at least one
    draft_width: int,
) -> list[Replayed]:
    """Drafts `draft_width` tokens after every answer token but the last, and counts how many are
    right. Returns one result for each prompt, in their order. Raises InputError if the drafter does
    not fit the target."""
    check_drafter(drafter.config.to_dict(), target.config.to_dict(), "given", "given")
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    replayed: dict[int, Replayed] = {}
    for start in range(0, len(order), ROWS_PER_FORWARD):
        chosen = order[start : start + ROWS_PER_FORWARD]
        rows = [KnownSequence(prompts[i] + answers[i], len(prompts[i])) for i in chosen]
        replayed |= zip(chosen, _replay_rows(target, drafter, rows, draft_width), strict=True)
    return [replayed[i] for i in range(len(prompts))]


def _replay_rows(
    target: Target, drafter: DFlashDrafter, rows: list[KnownSequence], draft_width: int
) -> list[Replayed]:
    """Returns what `replay` returns, for sequences that fit into one forward of the target."""
    tokens = pad_sequences(rows, target.device)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=target.device)
    first = torch.tensor([row.first_anchor for row in rows], device=target.device)
    states, logits = target.states(tokens, drafter.target_layer_ids)
    first_logits = logits[torch.arange(len(rows), device=target.device), first - 1].float().cpu()
    del logits
    matches: list[list[int]] = [[] for _ in rows]
    num_anchors = int((lengths - 1 - first).max())
    for start in range(0, num_anchors, ANCHORS_PER_FORWARD):
        end = min(start + ANCHORS_PER_FORWARD, num_anchors)
        anchors = first[:, None] + torch.arange(start, end, device=target.device)
        anchors = torch.where(anchors < lengths[:, None] - 1, anchors, -1)
        widths = torch.full_like(anchors, draft_width + 1)
        blocks = make_blocks(
            tokens, lengths, anchors, widths, draft_width + 1, drafter.mask_token_id
        )
        guesses = block_logits(drafter, target, states, blocks).argmax(-1)
        right = (guesses == blocks.wanted).unflatten(1, (-1, draft_width + 1))[..., 1:]
        counts = right.int().cumprod(-1).sum(-1).tolist()
        for row, (row_anchors, row_counts) in enumerate(zip(anchors.tolist(), counts, strict=True)):
            matches[row] += [n for a, n in zip(row_anchors, row_counts, strict=True) if a >= 0]
    answers = [row.tokens[row.first_anchor :] for row in rows]
    return list(map(Replayed, answers, first_logits, matches))


def mean_length(lengths: Sequence[Sequence[int]]) -> float:
    """Returns τ, the mean length over all verifications of all prompts, from the lengths of each
    prompt. Returns 1, as without drafts, if there are no verifications."""
    num_verifications = sum(map(len, lengths))
    return sum(map(sum, lengths)) / num_verifications if num_verifications else 1.0
