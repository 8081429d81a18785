"""What a step's logits, and all that is made of them, may take, and the most that they have taken.

Counted on the host, from the shapes of what is computed: no allocator is asked, so it is the same
on every device, and nothing waits.
"""


class SamplingMemory:
    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes`: of tiles, beside logits that are held whole."""
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0

    def take(self, num_bytes: int) -> None:
        """So much is held at once."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)
