"""Batches of a step: questions about pictures, and the text tasks that are to be kept."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.batches import FILLER_WEIGHT, Batch, collate, training_batches
from checkpoints.recipes.images.drawing import Picture
from checkpoints.recipes.images.prompts import prompt_ids
from checkpoints.recipes.images.tasks import generate_image
from checkpoints.recipes.task_shares import TASK_SHARES
from checkpoints.recipes.tokenizer import EOS_ID

IMAGE_SHARES = {"image_digit": 0.5, "image_row": 1.5, "image_add": 2.0, "image_count": 2.0}
# Of a stage of its own: what is learnt last comes up more often.
LATER_IMAGE_SHARES = {"image_digit": 0.3, "image_row": 2.0, "image_add": 0.7, "image_count": 3.0}
STEPS_A_POOL = 16  # steps that take their text from one pool


def image_batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    rows: int,
    canvas_length: int,
    shares: dict[str, float] = IMAGE_SHARES,
) -> tuple[Batch, list[Picture]]:
    """Questions about one picture each, with the pictures."""
    encoded, pictures = [], []
    for task in rng.choices(list(shares), list(shares.values()), k=rows):
        example = generate_image(rng, task, held_out=False)
        prompt = prompt_ids(tokenizer, example.template_messages(), [example.picture.image])
        answer = [*tokenizer.encode(example.answer, add_special_tokens=False), EOS_ID]
        weight = [len(answer) ** -0.5] * len(answer)
        filler = canvas_length - len(answer)
        weight += [weight[0] * FILLER_WEIGHT] * filler
        encoded.append((prompt, answer + [EOS_ID] * filler, weight))
        pictures.append(example.picture)
    return collate(encoded), pictures


class TextBatches:
    """The text of each step of a run, which can be asked for from any step on."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int,
        canvas_length: int,
        copies: int,
        tokens_per_batch: int,
    ) -> None:
        self._seed = seed
        self._pool = partial(
            training_batches,
            tokenizer,
            TASK_SHARES,
            canvas_length=canvas_length,
            canvases_per_prefix=copies,
            tokens_per_batch=tokens_per_batch,
        )
        self._batches: Iterator[Batch] = iter(())
        self._next = -1

    def at(self, step: int) -> Batch:
        """The batch of `step`; quick for steps one after the other."""
        pool, place = divmod(step, STEPS_A_POOL)
        if step != self._next or place == 0:
            self._batches = islice(self._pool(seed=self._seed * 100_003 + pool), place, None)
        self._next = step + 1
        return next(self._batches)
