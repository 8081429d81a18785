"""What every step trains on: batches of sequences, and the blocks after anchors in them.

Drawn from the seed and the step only, so that a resumed run sees what it would have seen.
"""

import random
from collections.abc import Iterator

from vllm_dllm.tools.drafter.training.blocks import KnownSequence
from vllm_dllm.tools.drafter.training.options import Options
from vllm_dllm.tools.drafter.training.packing import pack


def batches(
    sequences: list[KnownSequence], options: Options, num_blocks: int
) -> Iterator[list[KnownSequence]]:
    """Endless batches of about `tokens_per_batch` tokens, of similar length; always the same."""
    rng = random.Random(options.seed)

    def length(sequence: KnownSequence) -> int:
        return len(sequence.tokens) + num_blocks * options.block_size

    while True:
        epoch = pack(sequences, length, options.tokens_per_batch, rng)
        rng.shuffle(epoch)
        yield from epoch


def draw_anchors(
    rows: list[KnownSequence], options: Options, step: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Anchors and widths [B][N] of a step; anchor -1 fills the rows that have fewer."""
    rng = random.Random(f"{options.seed} {step}")
    anchors: list[list[int]] = []
    for row in rows:
        choices = range(row.first_anchor, len(row.tokens) - 1)
        anchors.append(rng.sample(choices, min(len(choices), options.blocks_per_sequence)))
    num_blocks = max(map(len, anchors))
    anchors = [row + [-1] * (num_blocks - len(row)) for row in anchors]
    widths = [
        [
            rng.randint(2, options.block_size)
            if rng.random() < options.narrow_share
            else options.block_size
            for _ in row
        ]
        for row in anchors
    ]
    return anchors, widths
