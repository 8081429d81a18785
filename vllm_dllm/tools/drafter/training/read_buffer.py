"""Reads the blocks that a serving drafter kept (`buffer.py`), to train it on."""

import json
from pathlib import Path

from vllm_dllm.drafters.buffer import PATTERN
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.training.blocks import KnownSequence


def read_buffer(path: Path, vocab_size: int) -> list[KnownSequence]:
    """Reads the blocks of a buffer, oldest first, as sequences to train on.

    After a block's anchor come the accepted tokens and the one the target put in place of the first
    wrong guess; what would have followed that guess is not known.
    """
    shards = sorted(path.glob(PATTERN))
    if not shards:
        raise InputError(f"{path} holds no buffer: expected files {PATTERN}")
    sequences = []
    for shard in shards:
        lines = shard.read_bytes().split(b"\n")[:-1]  # the rest is not a whole line
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                sequence = KnownSequence(row["tokens"], row["anchor"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise InputError(
                    f'{shard}, line {number}: expected {{"tokens": [...], "anchor": 3}}: {error!r}'
                ) from error
            largest = max(sequence.tokens, default=0)
            if largest >= vocab_size:
                raise InputError(
                    f"{shard}, line {number} has token {largest}, the drafter's vocabulary has "
                    f"{vocab_size} tokens: the buffer belongs to another model"
                )
            if 0 <= sequence.first_anchor < len(sequence.tokens) - 1:
                sequences.append(sequence)
    if not sequences:
        raise InputError(f"{path} holds no block with a known token after its anchor")
    return sequences
