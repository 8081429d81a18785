"""The learning rate over a training run."""


def learning_rate_scale(
    progress: float,  # of the run, from 0 to 1
    *,
    warmup: float,  # share of the run
    decay: float,  # share of the run
    head_start: float = 0.0,
) -> float:
    """What to multiply the learning rate by: linear warm-up, constant, then linear to zero.

    head_start: how far the warm-up is ahead of `progress`. If progress is read before a step and
    not after it, the first step would otherwise have a rate of 0.
    """
    return min((progress + head_start) / warmup, 1.0) * min(1.0, (1.0 - progress) / decay)
