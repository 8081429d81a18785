"""Edits of LLaDA2.2's blocks, whose text shrinks and grows: a candidate may delete the token at its
position, or insert a mask before it.

A block keeps its length: a deletion leaves a mask at the end, and an insertion pushes the last
token out. The rules are those of the loop in the checkpoints' own modeling_llada2_moe.py.
`step.masked.levenshtein_step` runs the steps.

Legend: n = blocks, C = canvas length.
"""

from typing import NamedTuple

import torch

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.masked import Candidates, GrammarReveal, MaskedRules, reveal_candidates


class EditTokens(NamedTuple):
    """The ids of tokens that have a meaning for edits."""

    mask: int
    delete: int
    split: int  # replaces a token by a mask and that token


class Round(NamedTuple):
    """What a step knows of n blocks before it writes its candidates."""

    canvas: torch.Tensor  # [n, C] int64
    valid: torch.Tensor | None  # [n, C] bool, positions that are part of their block; None: all
    hidden: torch.Tensor  # [n, C] bool
    original: torch.Tensor  # [n, C] bool, masks that the block began with, wherever they moved
    post_steps: torch.Tensor  # [n] int64, consecutive steps, up to this, without an original mask
    is_last: torch.Tensor  # [n] bool, blocks of which this step reveals all positions
    keeps_places: torch.Tensor  # [n] bool, blocks in which it neither deletes nor inserts


def begin_round(
    canvas: torch.Tensor,  # [n, C] int64
    valid: torch.Tensor | None,  # [n, C] bool
    original: torch.Tensor,  # [n, C] bool, as the step before left it
    steps_done: torch.Tensor,  # [n] int64
    post_steps: torch.Tensor,  # [n] int64
    most_post_steps: torch.Tensor,  # [n] int64, at least 1
    most_steps: int,
    mask_id: int,
    stays: torch.Tensor | None,  # [n] bool, blocks whose tokens keep their places; None: none
) -> Round:
    """Returns what a step knows of its blocks: which positions are hidden, which of them since the
    block began, whether the step is the block's last, and whether tokens keep their places."""
    hidden = canvas == mask_id
    if valid is not None:
        hidden &= valid
    original = torch.where(steps_done[:, None] == 0, hidden, original)
    post_steps = torch.where((hidden & original).any(dim=-1), 0, post_steps + 1)
    is_last = (post_steps >= most_post_steps) | (steps_done + 1 >= most_steps)
    keeps_places = is_last if stays is None else is_last | stays
    return Round(canvas, valid, hidden, original, post_steps, is_last, keeps_places)


def write_candidates(
    step: Round,
    candidates: Candidates,  # [n, C]
    otherwise: torch.Tensor,  # [n, C] int64, in place of edits that move tokens where none may
    rules: MaskedRules,
    reveals_all: torch.Tensor,  # [n] bool, whatever the rules say
    edit_threshold: torch.Tensor,  # [n] fp32
    by_grammar: GrammarReveal | None,  # None: no block has a grammar. Those with one are unedited
    edit_tokens: EditTokens,
    barred: torch.Tensor | None = None,  # [n, C] bool, positions that are not edited; None: none
) -> torch.Tensor:
    """Returns [n, C] int64: the canvas with this step's candidates written, delete and split tokens
    included. Changes no argument."""
    hidden = step.hidden
    fresh = (hidden & ~step.original).sum(dim=-1)
    shown = reveal_candidates(candidates, hidden, rules._replace(least=rules.least + fresh))
    shown = torch.where((reveals_all | step.is_last)[:, None], hidden, shown)
    changed = likely_edits(step, candidates, edit_threshold)
    if barred is not None:
        changed &= ~barred
    moves = (candidates.tokens == edit_tokens.delete) | (candidates.tokens == edit_tokens.split)
    tokens = torch.where(step.keeps_places[:, None] & moves, otherwise, candidates.tokens)
    if by_grammar is not None:
        shown = torch.where(by_grammar.is_chosen[:, None], hidden & by_grammar.revealed, shown)
        tokens = torch.where(by_grammar.tokens >= 0, by_grammar.tokens, tokens)
        changed &= ~by_grammar.is_ruled[:, None]
    return torch.where(shown | changed, tokens, step.canvas)


def likely_edits(
    step: Round,
    candidates: Candidates,  # [n, C]
    edit_threshold: torch.Tensor,  # [n] fp32
) -> torch.Tensor:
    """Returns [n, C] bool: positions whose token a more probable candidate may replace."""
    is_likely = candidates.probability > edit_threshold[:, None]
    changed = ~step.hidden & is_likely & (candidates.tokens != step.canvas)
    return changed if step.valid is None else changed & step.valid


class Moved(NamedTuple):
    """Blocks after deletions and insertions."""

    canvas: torch.Tensor  # [n, C] int64
    original: torch.Tensor  # [n, C] bool, as in `Round`


def delete_and_insert(step: Round, written: torch.Tensor, tokens: EditTokens) -> Moved:
    """Returns the blocks after the delete and split tokens in `written` [n, C] int64 are carried
    out. Each position of the result looks up where its token comes from."""
    is_split = written == tokens.split
    counts = 1 + is_split.long() - (written == tokens.delete).long()
    if step.valid is not None:
        counts *= step.valid
    ends = counts.cumsum(dim=-1)
    place = torch.arange(written.shape[-1], device=written.device).expand_as(written)
    source = torch.searchsorted(ends, place.contiguous(), right=True)
    is_new = source == written.shape[-1]  # behind what is left
    source = source.clamp(max=written.shape[-1] - 1)
    was_split = is_split.gather(-1, source)
    is_new |= was_split & (place == ends.gather(-1, source) - 2)
    kept = torch.where(was_split, step.canvas.gather(-1, source), written.gather(-1, source))
    return Moved(
        canvas=torch.where(is_new, tokens.mask, kept),
        original=step.original.gather(-1, source) & ~is_new,
    )


def fingerprint(
    canvas: torch.Tensor,  # [n, C] int64
    valid: torch.Tensor | None,  # [n, C] bool
) -> torch.Tensor:
    """Returns a hash of each canvas, [n] int64. Two different canvases have the same one with
    probability 2 ** -60."""
    factors = noise.keys_from_seeds(torch.arange(canvas.shape[-1], device=canvas.device)) | 1
    terms = (canvas + 1) * factors
    return (terms if valid is None else terms * valid).sum(dim=-1)
