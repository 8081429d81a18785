"""Turns task examples into padded training batches of similar prefix length."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vllm_dllm.checkpoint.tasks import Example, generate
from vllm_dllm.checkpoint.tokenizer import EOS_ID, PAD_ID

FILLER_WEIGHT = 0.1  # of positions after the first EOS, which no reader sees
POOL_SIZE = 384  # examples sorted by length together


@dataclass
class Batch:
    """B rows: a prefix that ends where a canvas starts, and what the canvas should hold."""

    prefix: Tensor  # [B, P] int64, left-padded
    is_token: Tensor  # [B, P] bool
    target: Tensor  # [B, C] int64
    weight: Tensor  # [B, C] float32, loss weight

    def to(self, device: str) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def encode_example(
    tokenizer: PreTrainedTokenizerFast, example: Example, canvas_length: int
) -> list[tuple[list[int], list[int], list[float]]]:
    """(prefix, canvas, weight) of every canvas of the answer.

    The answer ends with EOS and fills its last canvas with EOS. The prefix of a later canvas is the
    prompt and the whole canvases before it, as in generation.
    """
    text = tokenizer.apply_chat_template(
        example.messages(), tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = [*tokenizer.encode(example.answer, add_special_tokens=False), EOS_ID]
    # Per-token weight falls with length, or long answers would be all of the loss.
    weight = [len(answer) ** -0.5] * len(answer)
    padding = -len(answer) % canvas_length
    weight += [weight[0] * FILLER_WEIGHT] * padding
    answer += [EOS_ID] * padding
    return [
        (prompt + answer[:start], answer[start:end], weight[start:end])
        for start in range(0, len(answer), canvas_length)
        for end in [start + canvas_length]
    ]


def collate(rows: list[tuple[list[int], list[int], list[float]]]) -> Batch:
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
) -> Iterator[Batch]:
    """Endless batches of about `tokens_per_batch` tokens, prefix and canvases counted."""
    rng = random.Random(seed)
    tasks, shares = list(task_shares), list(task_shares.values())
    while True:
        pool = []
        for task in rng.choices(tasks, shares, k=POOL_SIZE):
            example = generate(rng, task, held_out=False)
            pool.append(rng.choice(encode_example(tokenizer, example, canvas_length)))
        # Noise on the sort key mixes the tasks whose prompts are equally short.
        pool.sort(key=lambda row: len(row[0]) + rng.uniform(0, 24))
        batches: list[Any] = []
        rows: list[Any] = []
        longest = 0
        for row in pool:
            longest = max(longest, len(row[0]))
            size = (len(rows) + 1) * (longest + canvases_per_prefix * canvas_length)
            if rows and size > tokens_per_batch:
                batches.append(collate(rows))
                rows, longest = [], len(row[0])
            rows.append(row)
        # The unfinished last batch is dropped only if it is a sliver of the pool.
        if len(rows) >= 4:
            batches.append(collate(rows))
        rng.shuffle(batches)
        yield from batches
