"""Prompts and answers that the target is trained on, in batches."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.packing import POOL_SIZE, encode_example, pack
from checkpoints.recipes.tasks import generate
from checkpoints.recipes.tokenizer import PAD_ID

Row = tuple[str, list[int], list[int]]
"""Task, prompt, answer."""


@dataclass
class Batch:
    """B rows of prompt and answer, right-padded, so that causal attention needs no mask."""

    tasks: list[str]  # of each row
    tokens: Tensor  # [B, T] int64
    weight: Tensor  # [B, T - 1] float32, loss weight of tokens[:, 1:]; 0 outside of the answer


def _collate(rows: list[Row]) -> Batch:
    length = max(len(prompt) + len(answer) for _, prompt, answer in rows)
    tokens = torch.full((len(rows), length), PAD_ID)
    weight = torch.zeros(len(rows), length - 1)
    for row, (_, prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        # Per-token weight falls with length, or long answers would dominate the loss.
        weight[row, len(prompt) - 1 : end - 1] = len(answer) ** -0.5
    return Batch([task for task, _, _ in rows], tokens, weight)


def training_batches(
    tokenizer: PreTrainedTokenizerFast,
    task_shares: Callable[[], dict[str, float]],
    *,
    seed: int,
    tokens_per_batch: int,
) -> Iterator[Batch]:
    """Endless batches of rows of similar length; calls `task_shares` before each pool of rows."""
    rng = random.Random(seed)
    while True:
        shares = task_shares()
        pool: list[Row] = []
        for task in rng.choices(list(shares), list(shares.values()), k=POOL_SIZE):
            example = generate(rng, task, held_out=False)
            pool.append((task, *encode_example(tokenizer, example)))
        batches = pack(pool, lambda row: len(row[1]) + len(row[2]), tokens_per_batch, rng)
        rng.shuffle(batches)
        yield from map(_collate, batches)
