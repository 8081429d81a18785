"""Prompts and answers that the small masked model is trained on, in batches.

As SDAR is trained (github.com/JetAstra/SDAR): a row holds a sequence twice, clean and with masks.
A masked block sees the clean blocks before it and itself; clean blocks see clean ones only. So one
forward asks for every block of an answer at once.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.packing import POOL_SIZE, encode_example, pack
from checkpoints.recipes.target_batches import Row
from checkpoints.recipes.tasks import generate
from checkpoints.recipes.tokenizer import EOS_ID, PAD_ID

MASK_TOKEN = "<unused0>"
BLOCK_LENGTHS = (4, 8, 16, 32)
ALL_HIDDEN = 0.3
"""Share of blocks of which nothing is known, as at a block's first step."""
PADDING_WEIGHT = 0.25
"""Loss weight of a token behind an answer's end, beside one of the answer."""
_NOTHING = -1  # the block of padding


@dataclass
class Batch:
    """R rows of S positions: clean tokens, then the blocks that hold the answer with masks."""

    tasks: list[str]  # of each row
    tokens: Tensor  # [R, S] int64
    positions: Tensor  # [R, S] int64, the same for both copies of a token
    visible: Tensor  # [R, S, S] bool, [query, key]
    target: Tensor  # [R, S] int64, what a mask hides
    weight: Tensor  # [R, S] float32, of the loss; 0 where there is no mask


def _masked_copy(
    prompt: list[int], answer: list[int], block_length: int, mask_id: int, rng: random.Random
) -> tuple[list[int], list[int], list[float]]:
    """(clean tokens in whole blocks, the same with masks from the answer's first block on, loss
    weight of each of those). Behind the answer's end its end is repeated."""
    first = len(prompt)
    clean = prompt + answer
    clean += [EOS_ID] * (-len(clean) % block_length)
    start = first // block_length * block_length
    masked, weight = clean[start:], [0.0] * (len(clean) - start)
    for block in range(start, len(clean), block_length):
        own = range(max(block, first), block + block_length)
        share = 1.0 if rng.random() < ALL_HIDDEN else rng.random()
        hidden = {i for i in own if rng.random() < share} or {rng.choice(own)}
        for i in hidden:
            is_answer = i < first + len(answer)
            masked[i - start] = mask_id
            weight[i - start] = len(answer) ** -0.5 * (1.0 if is_answer else PADDING_WEIGHT)
    return clean, masked, weight


def collate(rows: list[Row], block_length: int, mask_id: int, rng: random.Random) -> Batch:
    copies = [
        _masked_copy(prompt, answer, block_length, mask_id, rng) for _, prompt, answer in rows
    ]
    length = max(len(clean) + len(masked) for clean, masked, _ in copies)
    tokens = torch.full((len(rows), length), PAD_ID)
    positions, target = torch.zeros_like(tokens), torch.zeros_like(tokens)
    weight = torch.zeros(len(rows), length)
    block, is_masked = torch.full_like(tokens, _NOTHING), torch.zeros_like(tokens, dtype=torch.bool)
    for row, (clean, masked, own_weight) in enumerate(copies):
        middle, end, start = len(clean), len(clean) + len(masked), len(clean) - len(masked)
        tokens[row, :end] = torch.tensor(clean + masked)
        positions[row, :middle] = torch.arange(middle)
        positions[row, middle:end] = torch.arange(start, middle)
        block[row, :end] = positions[row, :end] // block_length
        is_masked[row, middle:end] = True
        target[row, middle:end] = torch.tensor(clean[start:])
        weight[row, middle:end] = torch.tensor(own_weight)
    return Batch(
        [task for task, _, _ in rows], tokens, positions, _visible(block, is_masked), target, weight
    )


def _visible(block: Tensor, is_masked: Tensor) -> Tensor:
    """[R, S, S] of blocks and copies [R, S]."""
    query, key = block[:, :, None], block[:, None, :]
    masked_query, masked_key = is_masked[:, :, None], is_masked[:, None, :]
    sees_clean = ~masked_key & (key < query + (~masked_query).long())
    sees_masked = masked_key & masked_query & (key == query)
    is_padding = query == _NOTHING  # sees itself, or its softmax would be of nothing
    return torch.where(is_padding | (key == _NOTHING), query == key, sees_clean | sees_masked)


def masked_batches(
    tokenizer: PreTrainedTokenizerFast,
    shares: Mapping[str, float],
    *,
    mask_id: int,
    seed: int,
    tokens_per_batch: int,
) -> Iterator[Batch]:
    """Endless batches of rows of similar length, each of one block length."""
    rng = random.Random(seed)
    while True:
        pool: list[Row] = []
        for task in rng.choices(list(shares), list(shares.values()), k=POOL_SIZE):
            example = generate(rng, task, held_out=False)
            pool.append((task, *encode_example(tokenizer, example)))
        batches = pack(pool, lambda row: len(row[1]) + 2 * len(row[2]), tokens_per_batch, rng)
        rng.shuffle(batches)
        for rows in batches:
            yield collate(rows, rng.choice(BLOCK_LENGTHS), mask_id, rng)
