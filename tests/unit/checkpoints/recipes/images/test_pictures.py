"""Drawn pictures are the same every time, and show what the answers say."""

import random
import re

import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.images.digits import digit_inks
from checkpoints.recipes.images.drawing import COLOURS, NOTHING, PAPER, PATCH, SQUARE, STRIP
from checkpoints.recipes.images.patches import num_tokens, to_patches
from checkpoints.recipes.images.prompts import prompt_ids, read_images
from checkpoints.recipes.images.seeing import image_processor
from checkpoints.recipes.images.tasks import (
    IMAGE_TASKS,
    ImageExample,
    generate_image,
    held_out_image_examples,
)
from checkpoints.recipes.tokenizer import BOI_ID, EOI_ID, IMAGE_ID, build_tokenizer
from tests import tolerances
from tests.paths import CHECKPOINTS

SIDES = [False, True]


def examples(held_out: bool, per_task: int = 20) -> list[ImageExample]:
    rng = random.Random(3)
    return [
        generate_image(rng, task, held_out=held_out)
        for task in IMAGE_TASKS
        for _ in range(per_task)
    ]


@pytest.mark.parametrize("held_out", SIDES)
def test_the_same_seed_draws_the_same(held_out: bool) -> None:
    first, second = examples(held_out), examples(held_out)
    assert [one.messages() for one in first] == [one.messages() for one in second]
    assert len({one.picture.image.tobytes() for one in first}) == len(first)


def test_the_file_is_what_the_code_draws() -> None:
    rows = read_rows(CHECKPOINTS / "held_out_images.jsonl")
    drawn = held_out_image_examples()
    assert [row["answer"] for row in rows] == [example.answer for example in drawn]
    for row, example in zip(rows, drawn, strict=True):
        # Not the bytes of the files: another zlib packs them otherwise.
        [image] = read_images(row["messages"])
        assert image.tobytes() == example.picture.image.tobytes()
        assert row["messages"][0]["content"][1]["text"] == example.prompt


def test_no_digit_is_on_both_sides() -> None:
    for digit in range(10):
        sides = [{ink.tobytes() for ink in digit_inks(digit, held_out=side)} for side in SIDES]
        assert not sides[0] & sides[1] and len(sides[1]) >= 20 and len(sides[0]) >= 100


@pytest.mark.parametrize("held_out", SIDES)
def test_answers(held_out: bool) -> None:
    """A row is its caption's digits, a sum is right, and counts agree with the colours shown."""
    for example in examples(held_out):
        words = [words[-1] for words in example.picture.caption]
        if example.task == "image_add":
            a, b, total = map(int, re.split(r"[+=]", example.answer))
            assert [str(a), str(b)] == words and a + b == total
        elif example.task == "image_count":
            colour, shape = example.prompt.removesuffix("?").split()[2:]
            place = list(COLOURS).index(colour) * 3 + ["squares", "circles", "stars"].index(shape)
            assert words[place] == example.answer
            assert patches_of(example, 10 + place) == 4 * int(example.answer)
        else:
            assert "".join(words) == example.answer


def patches_of(example: ImageExample, mark: int) -> int:
    return example.picture.marks.count(mark)


def test_marks_are_where_ink_is() -> None:
    for example in examples(held_out=False):
        image = example.picture.image
        width = image.width // PATCH
        paper = Image.new("RGB", (PATCH, PATCH), PAPER).tobytes()
        for i, mark in enumerate(example.picture.marks):
            left, top = i % width * PATCH, i // width * PATCH
            if mark == NOTHING:
                continue
            around = image.crop((left - PATCH, top - PATCH, left + 2 * PATCH, top + 2 * PATCH))
            assert around.tobytes() != paper * 9


def test_patches_are_those_of_the_image_processor() -> None:
    images = [example.picture.image for example in examples(held_out=True)]
    assert {image.size for image in images} == {SQUARE, STRIP}
    values, places = to_patches(images)
    made = image_processor()(images, return_tensors="pt")
    length = values.shape[1]
    torch.testing.assert_close(
        made["pixel_values"][:, :length].float(), values, **tolerances.short_formula()
    )
    assert torch.equal(made["image_position_ids"][:, :length], places)
    assert (made["image_position_ids"][:, length:] == -1).all()
    assert made["num_soft_tokens_per_image"].tolist() == [num_tokens(image) for image in images]
    assert isinstance(image_processor(), Gemma4ImageProcessorPil)


def test_a_prompt_has_room_for_its_picture() -> None:
    tokenizer = build_tokenizer()
    example = examples(held_out=True)[0]
    ids = prompt_ids(tokenizer, example.messages(), read_images(example.messages()))
    count = num_tokens(example.picture.image)
    run = [BOI_ID, *[IMAGE_ID] * count, EOI_ID]
    start = ids.index(BOI_ID)
    assert ids[start : start + count + 2] == run and ids.count(IMAGE_ID) == count
    assert tokenizer.decode(ids[start + count + 2 :]).startswith(example.prompt)
    assert ids == prompt_ids(tokenizer, example.template_messages(), [example.picture.image])
