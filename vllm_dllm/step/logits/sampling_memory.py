"""What a step's logits, and all that is made of them, may take, and the most that they have taken.

Counted on the host, from the shapes of what is computed: no allocator is asked, so it is the same
on every device, and nothing waits.
"""

from typing import Any

# fp32: logit, scaled, log-probability, probability, cumulative; top_k and top_p sort in between
BYTES_PER_WHOLE_LOGIT = 8 * 4


def step_bytes(model: Any, rows: int, budget_bytes: int) -> int:
    """Most memory that a step of so many rows takes for logits and what is made of them."""
    if model.streams_vocabulary:
        return budget_bytes
    # The LM head's output, its soft-capped copy, and one to which rules are applied.
    per_logit = model.vocabulary_shard()[1].element_size() + 8
    return budget_bytes + rows * model.config.vocab_size * per_logit


def whole_rows(vocab_size: int, budget_bytes: int) -> int:
    """Rows of which the logits, and what is made of them, fit the budget; at least one."""
    return max(1, budget_bytes // (vocab_size * BYTES_PER_WHOLE_LOGIT))


class SamplingMemory:
    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes`: of tiles, beside logits that are held whole."""
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0

    def record(self, num_bytes: int) -> None:
        """So much is held at once."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)
