"""One denoising step over a batch of canvases: statistics in, next canvases and verdicts out."""

from typing import NamedTuple

import torch

from vllm_dllm.config import DenoiseConfig
from vllm_dllm.denoise.acceptance import accept_by_entropy_bound
from vllm_dllm.denoise.convergence import is_confident, is_stable, push_history
from vllm_dllm.denoise.row_stats import RowStats


class CanvasState(NamedTuple):
    """What a canvas carries from step to step."""

    history: torch.Tensor  # [n, stability_threshold, C] int64, earlier best guesses
    steps_done: torch.Tensor  # [n] int32
    num_steps: torch.Tensor  # [n] int32, step cap N


class StepOutcome(NamedTuple):
    canvas: torch.Tensor  # [n, C] int64, the next step's input
    accepted: torch.Tensor  # [n, C] bool
    state: CanvasState
    finished: torch.Tensor  # [n] bool, converged or at the step cap


def denoise_step(
    stats: RowStats,  # fields [n, C]
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
    state: CanvasState,
    renoise_tokens: torch.Tensor,  # [n, C] int64
    config: DenoiseConfig,
) -> StepOutcome:
    """Accept, renoise and judge, as one pass of the reference's `_denoising_step`.

    Acceptance is decided anew each step: a position accepted before can be renoised again.
    """
    entropy = stats.entropy_nats
    accepted = accept_by_entropy_bound(
        entropy if valid is None else torch.where(valid, entropy, torch.inf), config.entropy_bound
    )
    converged = is_stable(stats.best_guess, state.history, valid) & is_confident(
        entropy, valid, config.confidence_threshold
    )
    steps_done = state.steps_done + 1
    return StepOutcome(
        canvas=torch.where(accepted, stats.candidate, renoise_tokens),
        accepted=accepted,
        state=CanvasState(
            history=push_history(state.history, stats.best_guess),
            steps_done=steps_done,
            num_steps=state.num_steps,
        ),
        finished=converged | (steps_done >= state.num_steps),
    )
