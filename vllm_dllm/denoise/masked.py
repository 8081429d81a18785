"""One step of a masked model's canvases: which hidden positions are revealed, and which revealed
tokens are replaced.

The rules are those of SDAR's published loops (`generate.py` of github.com/JetAstra/SDAR, and the
scheduler of its engine, JetEngine). Edits are LLaDA2.1's, parts of a block Fast-dLLM v2's, and stop
tokens behind which nothing counts are Fast-dLLM v2's and Nemotron-Labs-Diffusion's (their modelling
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
    """A token for each position, and how sure the model is of it. Fields are [n, C] or [rows]."""

    tokens: torch.Tensor  # int64
    probability: torch.Tensor  # fp32, of these tokens
    entropy_nats: torch.Tensor  # fp32, of the distributions that `probability` is from


class MaskedRules(NamedTuple):
    """Says which candidates a step reveals in each canvas. All fields are [n]."""

    threshold: torch.Tensor  # fp32, candidates that are more probable are revealed
    least: torch.Tensor  # int64, at least this many are revealed: the surest
    in_order: torch.Tensor | None  # bool, the first ones instead of the surest; None: nowhere
    entropy_bound: torch.Tensor | None  # fp32, nats; >= 0: the surest are those of least entropy,
    # and are revealed while their summed entropy is below the bound; NO_BOUND, or None for all:
    # neither


class Edits(NamedTuple):
    """Says which canvases may still change revealed tokens, and for how many steps. Fields are [n]
    unless marked."""

    is_chosen: torch.Tensor  # bool, these canvases; the others are finished when nothing is hidden
    threshold: torch.Tensor  # fp32, candidates that are more probable replace revealed tokens
    most_steps: torch.Tensor  # int64, most steps that find nothing hidden
    steps_done: torch.Tensor  # int64, steps so far that found nothing hidden
    barred: torch.Tensor | None = None  # [n, C] bool, positions that keep their tokens; None: none


class GrammarReveal(NamedTuple):
    """What grammars reveal in this step, in place of the rules."""

    is_ruled: torch.Tensor  # [n] bool, canvases with a grammar; their revealed tokens stay
    is_chosen: torch.Tensor  # [n] bool, those of them whose answer has not ended
    revealed: torch.Tensor  # [n, C] bool, positions that this step reveals
    tokens: torch.Tensor  # [n, C] int64, tokens that a grammar has chosen; < 0: none


class Ahead(NamedTuple):
    """What a step reveals behind the first unfinished part of a canvas."""

    threshold: torch.Tensor  # [n] fp32, candidates that are more probable are revealed
    num_parts: torch.Tensor | None  # [n], in this many, from the first unfinished one; None: all


class MaskedOutcome(NamedTuple):
    """What a step makes of n canvases."""

    canvas: torch.Tensor  # [n, C] int64, the next step's input
    tokens: torch.Tensor  # [n, C] int64, revealed ones, and candidates where nothing is
    revealed: torch.Tensor  # [n, C] bool
    finished: torch.Tensor  # [n] bool
    edited: "Edited | None" = None  # None: no canvas has edits


class Edited(NamedTuple):
    """How many steps canvases with edits have taken, and which of them are unchanged."""

    steps_done: torch.Tensor  # [n] int64, see `Edits`
    unchanged: torch.Tensor  # [n] bool, finished canvases that this step has read as they are


def draw_candidates(
    logits: torch.Tensor,  # [rows, V] fp32, temperature-scaled; MASKED_LOGIT, never -inf
    uniform: torch.Tensor | None,  # [rows] float in [0, 1); None: all take the most probable token
    is_greedy: torch.Tensor,  # [rows] bool, rows whose candidate is the most probable token
    judged: torch.Tensor
    | None = None,  # [rows, V] fp32, of probability and entropy; None: `logits`
) -> Candidates:
    """Returns a candidate for each row, and how sure the model is of it."""
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
    stops: torch.Tensor
    | None = None,  # [n, K] int64, tokens behind which nothing counts; None: none
    parts: torch.Tensor | None = None,  # [n, C] int64, rising: parts are revealed one after another
    by_grammar: GrammarReveal | None = None,  # None: no canvas has a grammar
    ahead: Ahead | None = None,  # None: nothing is revealed behind the first unfinished part
) -> MaskedOutcome:
    """Reveals hidden positions, replaces revealed tokens where edits allow it, and judges which
    canvases are finished. Changes no argument. A canvas is finished when no position that counts is
    hidden. With edits, it is finished by a step that found nothing hidden and nothing to change, or
    after `most_steps` steps that found nothing hidden."""
    hidden = ~revealed if valid is None else ~revealed & valid
    eligible = hidden if parts is None else hidden_in_first_part(hidden, parts, rules.least)
    reveals = reveal_candidates(candidates, eligible, rules)
    if ahead is not None:
        assert parts is not None, "an early part is one of several"
        reveals |= hidden_ahead(hidden, parts, ahead) & (
            candidates.probability > ahead.threshold[:, None]
        )
    if by_grammar is not None:
        reveals = torch.where(by_grammar.is_chosen[:, None], hidden & by_grammar.revealed, reveals)
        chosen = torch.where(by_grammar.tokens >= 0, by_grammar.tokens, candidates.tokens)
        candidates = candidates._replace(tokens=chosen)
    changed = None if edits is None else changed_tokens(candidates, canvas, revealed, edits)
    kept = revealed if changed is None else revealed & ~changed
    tokens = torch.where(kept, canvas, candidates.tokens)
    shown = revealed | reveals
    left = hidden_before_stop(hidden & ~reveals, tokens, shown, stops)
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


def verify_step(
    tokens: torch.Tensor,  # [n, C] int64, candidates, each drawn from a row that sees the tokens
    # before it, and where the canvas is a draft, none behind it
    canvas: torch.Tensor,  # [n, C] int64, what this step read
    revealed: torch.Tensor,  # [n, C] bool, by earlier steps: a prefix
    valid: torch.Tensor | None,  # as in `masked_step`
    is_draft: torch.Tensor,  # [n] bool, canvases whose hidden positions hold a draft
    stops: torch.Tensor | None,  # as in `masked_step`
    mask_id: int,
) -> MaskedOutcome:
    """Drafts canvases, or verifies their drafts, in turn (S2D2, arXiv 2603.25702). A canvas of
    masks is filled with its candidates, a draft that reveals nothing. In a draft, candidates are
    revealed up to and including the first that differs from the draft: its row has seen only
    accepted tokens. Positions behind it become masks again.

    So each revealed token is drawn given only the tokens before it, whatever was drafted.
    """
    hidden = ~revealed if valid is None else ~revealed & valid
    agrees = (tokens == canvas) | ~hidden
    all_before_agree = torch.ones_like(agrees)
    all_before_agree[:, 1:] = agrees[:, :-1].long().cumprod(dim=-1) == 1
    accepted = hidden & all_before_agree & is_draft[:, None]
    tokens, shown = torch.where(revealed, canvas, tokens), revealed | accepted
    left = hidden_before_stop(hidden & ~accepted, tokens, shown, stops)
    return MaskedOutcome(
        canvas=torch.where(shown | ~is_draft[:, None], tokens, mask_id),
        tokens=tokens,
        revealed=shown,
        finished=~left.any(dim=-1),
    )


def hidden_before_stop(
    hidden: torch.Tensor,  # [n, C] bool
    tokens: torch.Tensor,  # [n, C] int64
    revealed: torch.Tensor,  # [n, C] bool
    stops: torch.Tensor | None,  # [n, K] int64
) -> torch.Tensor:
    """Returns [n, C] bool: the hidden positions that have no revealed stop token before them."""
    if stops is None:
        return hidden
    is_stop = (tokens[:, :, None] == stops[:, None, :]).any(dim=-1) & revealed
    return hidden & (is_stop.cumsum(dim=-1) == 0)


def hidden_ahead(
    hidden: torch.Tensor,  # [n, C] bool
    parts: torch.Tensor,  # [n, C] int64
    ahead: Ahead,
) -> torch.Tensor:
    """Returns [n, C] bool: the hidden positions in the parts that may be revealed now, the first
    unfinished part among them."""
    if ahead.num_parts is None:
        return hidden
    first = torch.where(hidden, parts, parts.max()).amin(dim=-1, keepdim=True)
    return hidden & (parts < first + ahead.num_parts[:, None])


def threshold_ahead(threshold: torch.Tensor) -> torch.Tensor:
    """Returns [n] fp32: the threshold for blocks behind an unfinished one, given `threshold` [n]
    for the unfinished one. A candidate that reaches it is wrong a tenth as often."""
    return 1 - 0.1 * (1 - threshold)


def changed_tokens(
    candidates: Candidates,  # [n, C]
    canvas: torch.Tensor,  # [n, C] int64
    revealed: torch.Tensor,  # [n, C] bool
    edits: Edits,
) -> torch.Tensor:
    """Returns [n, C] bool: the revealed tokens that this step replaces."""
    is_likely = edits.is_chosen[:, None] & (candidates.probability > edits.threshold[:, None])
    changed = revealed & (candidates.tokens != canvas) & is_likely
    return changed if edits.barred is None else changed & ~edits.barred


def reveal_candidates(
    candidates: Candidates,  # [n, C]
    hidden: torch.Tensor,  # [n, C] bool, positions that hold the mask
    rules: MaskedRules,
) -> torch.Tensor:
    """Returns [n, C] bool: the hidden positions that this step reveals. Each canvas reveals at
    least `least`, or all that it has left."""
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


def hidden_in_first_part(
    hidden: torch.Tensor,  # [n, C] bool
    parts: torch.Tensor,  # [n, C] int64
    least: torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """Returns [n, C] bool: the hidden positions of the first part that has any, and of the next
    parts until there are at least `least` positions."""
    is_earlier = parts[:, None, :] < parts[:, :, None]
    hidden_earlier = (is_earlier & hidden[:, None, :]).sum(dim=-1)
    return hidden & (hidden_earlier < least.clamp(min=1)[:, None])


def even_share(
    steps_done: torch.Tensor,  # [n] int64
    num_steps: torch.Tensor,  # [n] int64
    canvas_length: int | torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """Returns [n] int64: how many positions the coming step reveals if a canvas takes `num_steps`
    steps. The first steps reveal one more if the positions do not divide evenly."""
    return canvas_length // num_steps + (steps_done < canvas_length % num_steps)
