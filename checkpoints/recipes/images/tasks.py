"""Questions about drawn pictures, with answers that can be checked exactly.

    python -m checkpoints.recipes.images.tasks > checkpoints/held_out_images.jsonl

Held-out pictures of numbers are drawn from digits that training never sees; of pictures of shapes,
a hash of what stands where decides.
"""

import base64
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from checkpoints.recipes.images.drawing import (
    GRID,
    KINDS,
    Kind,
    Picture,
    draw_number,
    draw_row,
    draw_shapes,
    draw_two,
)
from checkpoints.recipes.tasks import HELD_OUT_SHARE

MOST_OF_A_KIND = 4


@dataclass(frozen=True)
class ImageExample:
    task: str
    picture: Picture
    prompt: str
    answer: str

    def messages(self) -> list[dict[str, Any]]:
        """Writes it as a client of OpenAI's API sends it: the picture, then the question."""
        url = {"url": data_url(self.picture.image)}
        return self._chat({"type": "image_url", "image_url": url})

    def template_messages(self) -> list[dict[str, Any]]:
        """Writes it as the chat template takes it, which does not look at pictures."""
        return self._chat({"type": "image"})

    def _chat(self, picture: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.prompt}]}]


def data_url(image: Image.Image) -> str:
    with BytesIO() as buffer:
        image.save(buffer, "PNG", optimize=True)
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_digit(rng: random.Random, held_out: bool) -> tuple[Picture, str, str]:
    digit = rng.randrange(10)
    picture = draw_number(rng, digit, held_out=held_out)
    return picture, "What number is shown?", str(digit)


def image_row(rng: random.Random, held_out: bool) -> tuple[Picture, str, str]:
    digits = [rng.randrange(10) for _ in range(rng.randint(2, 4))]
    picture = draw_row(rng, digits, held_out=held_out)
    return picture, "What number is shown?", "".join(map(str, digits))


def image_add(rng: random.Random, held_out: bool) -> tuple[Picture, str, str]:
    """A sum of one digit, as the columns of the text task are."""
    a = rng.randrange(10)
    b = rng.randint(0, 9 - a)
    picture = draw_two(rng, a, b, held_out=held_out)
    return picture, "Add the two numbers.", f"{a}+{b}={a + b}"


def image_count(rng: random.Random, held_out: bool) -> tuple[Picture, str, str]:
    """0 to 4 shapes of the kind that is asked for, among up to 5 others."""
    while True:
        asked = rng.choice(KINDS)
        count = rng.randint(0, MOST_OF_A_KIND)
        others = [kind for kind in KINDS if kind != asked]
        shown: list[Kind] = [asked] * count + rng.choices(others, k=rng.randint(1, 5))
        most = max(shown.count(kind) for kind in shown)
        cells = dict(zip(rng.sample(range(GRID * GRID), len(shown)), shown, strict=True))
        digest = hashlib.sha256(repr(sorted(cells.items())).encode()).digest()
        if most <= MOST_OF_A_KIND and (digest[0] % HELD_OUT_SHARE == 0) == held_out:
            break
    colour, shape = asked
    return draw_shapes(rng, cells), f"How many {colour} {shape}?", str(count)


IMAGE_TASKS: dict[str, Callable[[random.Random, bool], tuple[Picture, str, str]]] = {
    "image_digit": image_digit,
    "image_row": image_row,
    "image_add": image_add,
    "image_count": image_count,
}


def generate_image(rng: random.Random, task: str, *, held_out: bool) -> ImageExample:
    """A random example of `task` from the training side or the held-out side."""
    return ImageExample(task, *IMAGE_TASKS[task](rng, held_out))


def held_out_image_examples(per_task: int = 70, seed: int = 1) -> list[ImageExample]:
    """`per_task` held-out examples of every task."""
    rng = random.Random(seed)
    return [
        generate_image(rng, task, held_out=True) for task in IMAGE_TASKS for _ in range(per_task)
    ]


def main() -> None:
    for example in held_out_image_examples():
        row = {"task": example.task, "messages": example.messages(), "answer": example.answer}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
