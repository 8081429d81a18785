"""What the metrics count of a step, copied to the host ahead of its tokens. Nothing waits."""

import torch

from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.step.batch import CanvasBatch


def canvas_numbers(
    batch: CanvasBatch,
    outcome: StepOutcome,
    entropy_nats: torch.Tensor,  # [n, C]
    denoises: torch.Tensor,  # [n] bool, else the step's outcome is not used
) -> CanvasNumbers:
    accepted = outcome.accepted
    if batch.valid is not None:
        accepted, entropy_nats = accepted & batch.valid, entropy_nats * batch.valid
    columns = {
        "step": outcome.state.steps_done * denoises,
        "accepted": accepted.sum(dim=-1),
        "entropy": entropy_nats.sum(dim=-1),
        "finished": outcome.finished,
    }
    if outcome.converged is not None:
        columns["converged"] = outcome.converged
    if outcome.revealed is not None:
        columns["revealed"] = outcome.revealed
    values = torch.stack([column.float() for column in columns.values()], dim=1)
    on_host = values.to("cpu", non_blocking=True)
    return CanvasNumbers(batch.requests_np, batch.lengths_np, tuple(columns), on_host.numpy())
