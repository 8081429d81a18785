"""Turns task examples into padded training batches of similar prefix length."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.packing import POOL_SIZE, encode_example, pack
from checkpoints.recipes.tasks import Example, generate
from checkpoints.recipes.tokenizer import EOS_ID, PAD_ID

FILLER_WEIGHT = 0.1  # of positions after the first EOS, which no reader sees

CanvasRow = tuple[list[int], list[int], list[float]]
"""Prefix, canvas and the weight of each position of the canvas."""


@dataclass
class Batch:
    """B rows: a prefix that ends where a canvas starts, and what the canvas should hold."""

    prefix: Tensor  # [B, P] int64, left-padded
    is_token: Tensor  # [B, P] bool
    target: Tensor  # [B, C] int64
    weight: Tensor  # [B, C] float32, loss weight

    def to(self, device: str) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def draw_training(rng: random.Random, task: str) -> Example:
    return generate(rng, task, held_out=False)


def encode_canvases(
    tokenizer: PreTrainedTokenizerFast, example: Example, canvas_length: int
) -> list[CanvasRow]:
    """A row for every canvas of the answer.

    The answer ends with EOS and fills its last canvas with EOS. The prefix of a later canvas is the
    prompt and the whole canvases before it, as in generation.
    """
    prompt, answer = encode_example(tokenizer, example)
    # Per-token weight falls with length, or long answers would dominate the loss.
    weight = [len(answer) ** -0.5] * len(answer)
    padding = -len(answer) % canvas_length
    weight += [weight[0] * FILLER_WEIGHT] * padding
    answer += [EOS_ID] * padding
    return [
        (prompt + answer[:start], answer[start:end], weight[start:end])
        for start in range(0, len(answer), canvas_length)
        for end in [start + canvas_length]
    ]


def collate(rows: list[CanvasRow]) -> Batch:
    length = max(len(prefix) for prefix, _, _ in rows)
    padded = [[PAD_ID] * (length - len(prefix)) + prefix for prefix, _, _ in rows]
    is_token = [[i >= length - len(prefix) for i in range(length)] for prefix, _, _ in rows]
    return Batch(
        torch.tensor(padded),
        torch.tensor(is_token),
        torch.tensor([canvas for _, canvas, _ in rows]),
        torch.tensor([weight for _, _, weight in rows]),
    )


def training_batches(
    tokenizer: PreTrainedTokenizerFast,
    task_shares: dict[str, float],
    *,
    seed: int,
    canvas_length: int,
    canvases_per_prefix: int,
    tokens_per_batch: int,
    draw: Callable[[random.Random, str], Example] = draw_training,
) -> Iterator[Batch]:
    """Endless batches of about `tokens_per_batch` tokens, counting prefix and canvases.

    draw: an example of a task.
    """
    rng = random.Random(seed)
    tasks, shares = list(task_shares), list(task_shares.values())

    def length(row: CanvasRow) -> int:
        return len(row[0]) + canvases_per_prefix * canvas_length

    while True:
        pool: list[CanvasRow] = []
        for task in rng.choices(tasks, shares, k=POOL_SIZE):
            example = draw(rng, task)
            pool.append(rng.choice(encode_canvases(tokenizer, example, canvas_length)))
        batches = pack(pool, length, tokens_per_batch, rng)
        # The unfinished last batch is dropped if it is a sliver of the pool.
        if len(batches[-1]) < 4:
            batches.pop()
        rng.shuffle(batches)
        yield from map(collate, batches)
