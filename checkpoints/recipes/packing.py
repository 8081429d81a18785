"""Turns examples into token ids, and rows of different lengths into batches that waste little."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.tasks import Example
from checkpoints.recipes.tokenizer import EOS_ID

POOL_SIZE = 384  # examples that are packed together
LENGTH_NOISE = 24  # tokens

Row = TypeVar("Row")


def encode_example(
    tokenizer: PreTrainedTokenizerFast, example: Example
) -> tuple[list[int], list[int]]:
    """(prompt, answer) as token ids; the answer ends with EOS."""
    text = tokenizer.apply_chat_template(
        example.messages(), tools=example.tools(), tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return prompt, [*tokenizer.encode(example.answer, add_special_tokens=False), EOS_ID]


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
