"""The memory that a step's logits and what is made of them may take, and the most they have taken.

It is counted on the host, from shapes: no allocator is asked, so it is the same on every device,
and nothing waits.
"""

from typing import Any

import torch

# fp32: logit, scaled, log-probability, probability, cumulative; top_k and top_p sort in between
BYTES_PER_WHOLE_LOGIT = 8 * 4


def most_step_bytes(model: Any, dtype: torch.dtype, rows: int, budget_bytes: int) -> int:
    """Returns the most bytes that a step of `rows` rows takes for logits and the values computed
    from them. `dtype`: the model's."""
    if model.streams_vocabulary:
        return budget_bytes
    # The LM head's output, its soft-capped copy, and one to which rules are applied.
    per_logit = dtype.itemsize + 8
    return budget_bytes + rows * model.config.vocab_size * per_logit


def rows_within_budget(vocab_size: int, budget_bytes: int) -> int:
    """Returns how many rows of logits, with the values computed from them, fit the budget; at least
    1."""
    return max(1, budget_bytes // (vocab_size * BYTES_PER_WHOLE_LOGIT))


class SamplingMemory:
    """Records the most memory that logits have taken."""

    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes`: the most that one tile of logits may take, beside logits that are held
        whole."""
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0

    def record(self, num_bytes: int) -> None:
        """Records that `num_bytes` are held at once."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)
