"""One step of a masked model's canvases: which of the hidden positions get their tokens, and which
of the others get another one.

The rules are those of SDAR's published loops (`generate.py` of github.com/JetAstra/SDAR, and the
scheduler of its engine, JetEngine), the edits are LLaDA2.1's, the parts of a block Fast-dLLM v2's,
and tokens behind which nothing counts are this one's and Nemotron-Labs-Diffusion's (their modelling
files). We differ in two things: only hidden positions are revealed, though the loops ask for more
than are left in a first canvas that holds a part of the prompt; and a canvas is never left with
hidden positions, though the entropy rule may want more than its steps.
"""

from typing import NamedTuple

import torch

from vllm_dllm.denoise.row_stats import argmax, sample_by_inversion

NO_BOUND = -1.0
"""An entropy bound that reveals nothing by itself."""


class Candidates(NamedTuple):
    """What a step would put at each position, [n, C], or one after the other, [rows]."""

    tokens: torch.Tensor  # int64
    probability: torch.Tensor  # fp32, of these tokens
    entropy_nats: torch.Tensor  # fp32, of the distributions in which they have it


class MaskedRules(NamedTuple):
    """How a step chooses, canvas by canvas: each [n]."""

    threshold: torch.Tensor  # fp32, a candidate that is more probable is revealed
    least: torch.Tensor  # int64, positions that are revealed at least
    in_order: torch.Tensor | None  # bool, these are the first ones, not the surest; None: nowhere
    entropy_bound: torch.Tensor | None  # fp32, nats; >= 0: the surest are those of least entropy,
    # and all are revealed while their summed entropy is below the bound; NO_BOUND, or None for all:
    # none of this


class Edits(NamedTuple):
    """Canvases whose revealed tokens may still change: each [n]."""

    is_chosen: torch.Tensor  # bool, the others are finished when nothing is hidden
    threshold: torch.Tensor  # fp32, a candidate that is more probable replaces a revealed token
    most_steps: torch.Tensor  # int64, of those that find nothing hidden
    steps_done: torch.Tensor  # int64, of those


class Held(NamedTuple):
    """Canvases of which a grammar says what is revealed."""

    is_ruled: torch.Tensor  # [n] bool, nothing that they have revealed changes
    is_chosen: torch.Tensor  # [n] bool, those of them whose answer has not ended
    revealed: torch.Tensor  # [n, C] bool, by this step
    tokens: torch.Tensor  # [n, C] int64, those of it that the grammar has chosen; < 0: none


class Ahead(NamedTuple):
    """What is revealed of a part while an earlier one is not finished."""

    threshold: torch.Tensor  # [n] fp32, candidates that are more probable
    num_parts: torch.Tensor | None  # [n], of so many parts from the first that is not finished;
    # None: of all


class MaskedOutcome(NamedTuple):
    canvas: torch.Tensor  # [n, C] int64, the next step's input
    tokens: torch.Tensor  # [n, C] int64, revealed ones, and candidates where nothing is
    revealed: torch.Tensor  # [n, C] bool
    finished: torch.Tensor  # [n] bool
    edited: "Edited | None" = None  # None: no canvas has edits


class Edited(NamedTuple):
    steps_done: torch.Tensor  # [n] int64, see `Edits`
    unchanged: torch.Tensor  # [n] bool, finished canvases that this step has read as they are


def draw_candidates(
    logits: torch.Tensor,  # [rows, V] fp32, temperature-scaled; MASKED_LOGIT, never -inf
    uniform: torch.Tensor | None,  # [rows] float in [0, 1); None: all candidates are the most
    # probable tokens
    is_greedy: torch.Tensor,  # [rows] bool, these are, if not all
    judged: torch.Tensor | None = None,  # [rows, V] fp32, logits of the distributions in which
    # candidates have their probability; None: those from which they are drawn
) -> Candidates:
    """A candidate for each row, and how sure the model is of it."""
    log_probs = logits.log_softmax(dim=-1)
    probs = log_probs.exp()
    tokens = argmax(logits)
    if uniform is not None:
        tokens = torch.where(is_greedy, tokens, sample_by_inversion(probs, uniform))
    if judged is not None:
        log_probs = judged.log_softmax(dim=-1)
        probs = log_probs.exp()
    return Candidates(
        tokens=tokens,
        probability=probs.gather(-1, tokens[:, None]).squeeze(-1),
        entropy_nats=log_probs.mul_(probs).sum(dim=-1).neg_(),
    )


def masked_step(
    candidates: Candidates,  # [n, C]
    canvas: torch.Tensor,  # [n, C] int64, what this step read
    revealed: torch.Tensor,  # [n, C] bool, by earlier steps
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas and may become
    # part of the answer; None: all
    rules: MaskedRules,
    edits: Edits | None,  # None: no canvas has any
    mask_id: int,
    stops: torch.Tensor | None = None,  # [n, K] int64, tokens behind which nothing counts; None: so
    # does all of a canvas, whatever it holds
    parts: torch.Tensor | None = None,  # [n, C] int64, rising: one is revealed after the other
    held: Held | None = None,  # None: no canvas has a grammar
    ahead: Ahead | None = None,  # None: nothing is
) -> MaskedOutcome:
    """A canvas is finished when nothing that counts is hidden; with edits, after a step that found
    nothing hidden and nothing to change, or after `most_steps` that found nothing hidden."""
    hidden = ~revealed if valid is None else ~revealed & valid
    eligible = hidden if parts is None else first_hidden(hidden, parts, rules.least)
    found = reveal_candidates(candidates, eligible, rules)
    if ahead is not None:
        assert parts is not None, "an early part is one of several"
        found |= hidden_ahead(hidden, parts, ahead) & (
            candidates.probability > ahead.threshold[:, None]
        )
    if held is not None:
        found = torch.where(held.is_chosen[:, None], hidden & held.revealed, found)
        chosen = torch.where(held.tokens >= 0, held.tokens, candidates.tokens)
        candidates = candidates._replace(tokens=chosen)
    changed = None if edits is None else changed_tokens(candidates, canvas, revealed, edits)
    kept = revealed if changed is None else revealed & ~changed
    tokens = torch.where(kept, canvas, candidates.tokens)
    left, shown = hidden & ~found, revealed | found
    if stops is not None:
        is_stop = (tokens[:, :, None] == stops[:, None, :]).any(dim=-1) & shown
        left &= is_stop.cumsum(dim=-1) == 0
    outcome = MaskedOutcome(
        canvas=torch.where(shown, tokens, mask_id),
        tokens=tokens,
        revealed=shown,
        finished=~left.any(dim=-1),
    )
    if edits is None or changed is None:
        return outcome
    is_complete = ~hidden.any(dim=-1)
    steps_done = edits.steps_done + is_complete
    unchanged = is_complete & ~changed.any(dim=-1)
    is_over = unchanged | (is_complete & (steps_done >= edits.most_steps))
    return outcome._replace(
        finished=torch.where(edits.is_chosen, is_over, outcome.finished),
        edited=Edited(steps_done, edits.is_chosen & unchanged),
    )


def hidden_ahead(
    hidden: torch.Tensor,  # [n, C] bool
    parts: torch.Tensor,  # [n, C] int64
    ahead: Ahead,
) -> torch.Tensor:
    """[n, C] bool: the hidden positions that do not wait for an earlier part."""
    if ahead.num_parts is None:
        return hidden
    first = torch.where(hidden, parts, parts.max()).amin(dim=-1, keepdim=True)
    return hidden & (parts < first + ahead.num_parts[:, None])


def ahead_of(threshold: torch.Tensor) -> torch.Tensor:
    """[n] fp32: how probable a candidate must be in a block behind one that is not finished, if
    `threshold` [n] is enough elsewhere: it may be wrong a tenth as often."""
    return 1 - 0.1 * (1 - threshold)


def changed_tokens(
    candidates: Candidates,  # [n, C]
    canvas: torch.Tensor,  # [n, C] int64
    revealed: torch.Tensor,  # [n, C] bool
    edits: Edits,
) -> torch.Tensor:
    """[n, C] bool: revealed tokens that this step replaces."""
    is_likely = edits.is_chosen[:, None] & (candidates.probability > edits.threshold[:, None])
    return revealed & (candidates.tokens != canvas) & is_likely


def reveal_candidates(
    candidates: Candidates,  # [n, C]
    hidden: torch.Tensor,  # [n, C] bool, positions that hold the mask
    rules: MaskedRules,
) -> torch.Tensor:
    """Positions revealed by this step, [n, C] bool; at least `least` of each canvas that has as
    many."""
    confidence, bound = candidates.probability, rules.entropy_bound
    if bound is not None:
        confidence = torch.where(bound[:, None] >= 0, -candidates.entropy_nats, confidence)
    if rules.in_order is not None:
        confidence = torch.where(rules.in_order[:, None], 0.0, confidence)
    # Stable: of equals, the first.
    ranked = torch.where(hidden, confidence, -torch.inf).sort(dim=-1, descending=True, stable=True)
    place = torch.arange(hidden.shape[-1], device=hidden.device)
    chosen = place < rules.least[:, None]
    if bound is not None:
        summed = torch.where(bound[:, None] >= 0, -ranked.values, 0.0).cumsum(-1)
        chosen |= summed < bound[:, None]
    chosen = torch.zeros_like(hidden).scatter(-1, ranked.indices, chosen)
    return hidden & (chosen | (candidates.probability > rules.threshold[:, None]))


def first_hidden(
    hidden: torch.Tensor,  # [n, C] bool
    parts: torch.Tensor,  # [n, C] int64
    least: torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """[n, C] bool: the hidden positions of the first part that has any, and of as many more as the
    `least` that a step reveals asks for."""
    is_earlier = parts[:, None, :] < parts[:, :, None]
    hidden_earlier = (is_earlier & hidden[:, None, :]).sum(dim=-1)
    return hidden & (hidden_earlier < least.clamp(min=1)[:, None])


def even_share(
    steps_done: torch.Tensor,  # [n] int64
    num_steps: torch.Tensor,  # [n] int64
    canvas_length: int | torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """[n] int64: positions that the coming step must reveal for a canvas to be done in `num_steps`;
    the first steps take the remainder."""
    return canvas_length // num_steps + (steps_done < canvas_length % num_steps)
