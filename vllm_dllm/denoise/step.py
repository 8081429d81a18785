"""One denoise step over a batch of canvases: statistics in, next canvases and verdicts out."""

from typing import NamedTuple

import torch

from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.rules import (
    AT_REST,
    Reveal,
    accept_by_entropy_bound,
    accept_forced_positions,
    is_confident,
    reveal_best_guesses,
    times_repeated,
    up_to_first_stop,
)


class StepRules(NamedTuple):
    """How canvases are denoised: each field is a number for all of them, or a tensor [n]."""

    entropy_bound: float | torch.Tensor  # nats
    confidence_threshold: float | torch.Tensor  # nats
    stability_threshold: int | torch.Tensor  # steps


class AnswerOnly(NamedTuple):
    """Says which canvases are judged by their answer alone, up to the first stop token. Such a
    canvas is finished when nothing in the answer changes any more and the model is sure of the
    answer or of the whole canvas. Behind a short answer it usually is, and the mean over few
    positions is harder to get below a threshold."""

    is_chosen: torch.Tensor  # [n] bool
    stop_tokens: torch.Tensor  # [n, K] int64; unused places are < 0


class LegalPaths(NamedTuple):
    """Says which canvases have the legal path of a grammar as their best guess."""

    is_chosen: torch.Tensor  # [n] bool
    forced: torch.Tensor  # [n, C] bool, positions where the grammar leaves one token
    free: torch.Tensor  # [n, C] bool, positions behind the answer's end, which count as decided


class CanvasState(NamedTuple):
    """What n canvases keep from step to step."""

    best_guess: torch.Tensor  # [n, C] int64, of the last step
    times_repeated: torch.Tensor  # [n] int64, see `rules.times_repeated`
    steps_done: torch.Tensor  # [n] int64
    num_steps: torch.Tensor  # [n] int64, step cap N


class StepOutcome(NamedTuple):
    """What a step makes of n canvases."""

    canvas: torch.Tensor  # [n, C] int64, the next step's input
    accepted: torch.Tensor  # [n, C] bool
    state: CanvasState
    finished: torch.Tensor  # [n] bool, for one of the two reasons below, or at the step cap
    converged: torch.Tensor | None = None  # [n] bool, the best guess has not changed and the model
    # is sure of it, or a grammar's has not changed for `AT_REST` steps; None: no canvas is judged
    # by that
    revealed: torch.Tensor | None = None  # [n] bool, nothing is hidden any more; None: never was


def denoise_step(
    stats: RowStats,  # fields [n, C]
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
    state: CanvasState,
    renoise_tokens: torch.Tensor,  # [n, C] int64
    rules: StepRules,
    revealing: Reveal | None = None,  # None: no canvas is revealed permanently
    answer_only: AnswerOnly | None = None,  # None: every position of a canvas counts
    constrained: LegalPaths | None = None,  # None: no canvas has a grammar
) -> StepOutcome:
    """Accepts candidates, renoises the other positions, and judges which canvases are finished,
    like one pass of the reference's `_denoising_step`. Changes no argument.

    Acceptance is decided anew in each step: a position accepted before can be renoised again. A
    canvas that is revealed permanently keeps the best guesses revealed so far, and is also finished
    when nothing is hidden.
    """
    entropy = stats.entropy_nats
    best_guess, candidate = stats.best_guess, stats.candidate
    ranked = entropy if valid is None else torch.where(valid, entropy, torch.inf)
    if constrained is None:
        accepted = accept_by_entropy_bound(ranked, rules.entropy_bound)
    else:
        ranked = ranked.masked_fill(constrained.forced, torch.inf)
        accepted = accept_by_entropy_bound(ranked, rules.entropy_bound)
        accepted = accept_forced_positions(accepted, constrained.forced)
    all_revealed = None
    if revealing is not None:
        chosen = revealing.is_chosen[:, None]
        kept = revealing.kept
        if constrained is not None:  # what a grammar repaired is hidden again
            kept &= ~constrained.is_chosen[:, None] | (revealing.tokens == best_guess)
        shown = kept | reveal_best_guesses(stats.best_logprob.exp(), valid, revealing)
        accepted = torch.where(chosen, shown, accepted)
        best_guess = torch.where(kept, revealing.tokens, best_guess)
        candidate = torch.where(chosen, best_guess, candidate)
        all_revealed = (shown if valid is None else shown | ~valid).all(-1) & revealing.is_chosen
    judged = valid
    if answer_only is not None:
        everywhere = torch.ones_like(accepted) if valid is None else valid
        answer = up_to_first_stop(best_guess, valid, answer_only.stop_tokens)
        judged = torch.where(answer_only.is_chosen[:, None], answer, everywhere)
    earlier = state.best_guess
    if constrained is not None:
        earlier = torch.where(constrained.free, best_guess, earlier)
        entropy = entropy.masked_fill(constrained.free, 0.0)
    repeated = times_repeated(best_guess, earlier, state.times_repeated, judged)
    is_sure = is_confident(entropy, judged, rules.confidence_threshold)
    if answer_only is not None:
        is_sure |= is_confident(entropy, valid, rules.confidence_threshold)
    converged = (repeated >= rules.stability_threshold) & is_sure
    if constrained is not None:
        # Never where tokens are revealed permanently: each changes the next guess.
        at_rest = (repeated >= AT_REST) & (repeated >= rules.stability_threshold)
        at_rest = at_rest if revealing is None else at_rest & ~revealing.is_chosen
        converged |= at_rest & constrained.is_chosen
    done = converged if all_revealed is None else converged | all_revealed
    steps_done = state.steps_done + 1
    return StepOutcome(
        canvas=torch.where(accepted, candidate, renoise_tokens),
        accepted=accepted,
        state=CanvasState(best_guess, repeated, steps_done, state.num_steps),
        finished=done | (steps_done >= state.num_steps),
        converged=converged,
        revealed=all_revealed,
    )


def temperature(
    steps_done: torch.Tensor,  # [n] int, denoising steps already taken on this canvas
    num_steps: torch.Tensor,  # [n] int, the request's step cap N
    t_min: float | torch.Tensor,  # for all canvases, or [n]
    t_span: float | torch.Tensor,  # t_max - t_min
) -> torch.Tensor:
    """Returns the coming step's temperature, [n] fp32: `t_min + t_span * s / N` with s steps left.
    It is hot while much is undecided, and cooler towards the last step. A request with a lower cap
    N goes through the whole schedule in N steps, like the reference's
    `LinearTemperatureScheduleLogitsProcessor(max_denoising_steps=N)`."""
    remaining = (num_steps - steps_done).clamp(min=1)
    return t_min + t_span * (remaining / num_steps)  # ints divide to fp32
