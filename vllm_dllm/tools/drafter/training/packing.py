"""Rows of different lengths, in batches that waste little."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

LENGTH_NOISE = 24  # tokens

Row = TypeVar("Row")


def pack(
    rows: Sequence[Row], length: Callable[[Row], int], tokens_per_batch: int, rng: random.Random
) -> list[list[Row]]:
    """Batches of rows, from short to long; each row is in one of them.

    Padded to its longest row, a batch has at most `tokens_per_batch` tokens, or is a single row.
    """
    # Noise on the sort key puts a row with others every time, also with rows of other tasks.
    order = sorted(rows, key=lambda row: length(row) + rng.uniform(0, LENGTH_NOISE))
    batches: list[list[Row]] = []
    batch: list[Row] = []
    longest = 0
    for row in order:
        longest = max(longest, length(row))
        if batch and (len(batch) + 1) * longest > tokens_per_batch:
            batches.append(batch)
            batch, longest = [], length(row)
        batch.append(row)
    batches.append(batch)
    return batches
