"""Counts a step's canvases for the metrics, and copies the numbers to the host without waiting."""

from collections.abc import Sequence

import torch

from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.step.batch import CanvasBatch


def count_canvases(
    batch: CanvasBatch,
    outcome: StepOutcome,
    entropy_nats: torch.Tensor,  # [n, C]
    denoises: torch.Tensor,  # [n] bool, canvases that are denoised, not committed or taken back
    is_committed: torch.Tensor | None = None,  # [n] bool, as in `Denoised`
    verified_now: torch.Tensor | None = None,  # [n] bool, drafts whose tokens this step verifies
    cut: Sequence[int] = (),  # as in `CanvasNumbers`
) -> CanvasNumbers:
    """Returns the numbers of a step's canvases for the metrics, still being copied to the host."""
    accepted = outcome.accepted
    if batch.valid is not None:
        accepted, entropy_nats = accepted & batch.valid, entropy_nats * batch.valid
    flags = {"denoises": denoises, "finished": outcome.finished}
    if outcome.converged is not None:
        flags["converged"] = outcome.converged
    if outcome.revealed is not None:
        flags["revealed"] = outcome.revealed
    if is_committed is not None:
        flags["committed"] = is_committed & denoises
    if verified_now is not None:
        flags["verified"] = verified_now
    # Written in place, because on small batches each operation costs the same.
    values = entropy_nats.new_empty(3 + len(flags), len(denoises), dtype=torch.float32)
    values[0] = outcome.state.steps_done
    torch.sum(accepted, dim=-1, dtype=torch.float32, out=values[1])
    torch.sum(entropy_nats, dim=-1, out=values[2])
    values[3:] = torch.stack(tuple(flags.values()))
    found = copy_numbers_to_host(batch, ("step", "accepted", "entropy", *flags), values)
    return found._replace(cut=cut)


def copy_numbers_to_host(
    batch: CanvasBatch, names: tuple[str, ...], values: torch.Tensor
) -> CanvasNumbers:
    """Starts copying a step's numbers `values` [names, n] fp32 to the host, and returns them. Read
    them only after the step's tokens have arrived. `names`: the rows of `values`, in order."""
    return CanvasNumbers(
        batch.requests_np.tolist(),
        batch.lengths_np.tolist(),
        names,
        values.to("cpu", non_blocking=True).numpy(),
    )
