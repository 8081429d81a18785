"""Temperature schedule: hot while much is undecided, cooler towards the last step."""

import torch


def temperature(
    steps_done: torch.Tensor,  # [n] int, denoising steps already taken on this canvas
    num_steps: torch.Tensor,  # [n] int, the request's step cap N
    t_min: float | torch.Tensor,  # for all canvases, or [n]
    t_span: float | torch.Tensor,  # t_max - t_min
) -> torch.Tensor:
    """Returns the coming step's temperature, [n] fp32: `t_min + t_span * s / N` with s steps left.

    A request with a lower cap N goes through the whole schedule in N steps, like the reference's
    `LinearTemperatureScheduleLogitsProcessor(max_denoising_steps=N)`.
    """
    remaining = (num_steps - steps_done).clamp(min=1)
    return t_min + t_span * (remaining / num_steps)  # ints divide to fp32
