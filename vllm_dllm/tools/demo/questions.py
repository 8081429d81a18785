"""The questions of the demo. A checkpoint that takes images is also asked about pictures."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from openai.types.chat import ChatCompletionUserMessageParam
from PIL import Image

from vllm_dllm.quantization.weight_files import read_json

_PICTURES = Path(__file__).parent / "pictures"


@dataclass(frozen=True)
class Question:
    """A question to a model, perhaps about a picture."""

    text: str
    picture: Path | None = None  # a PNG file

    @cached_property
    def image(self) -> Image.Image | None:
        """The picture, in RGB; None if the question has no picture."""
        if self.picture is None:
            return None
        with Image.open(self.picture) as image:
            return image.convert("RGB")

    @property
    def message(self) -> ChatCompletionUserMessageParam:
        """The chat message that asks the question."""
        if self.picture is None:
            return {"role": "user", "content": self.text}
        return {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": self.data_url}},
                {"type": "text", "text": self.text},
            ],
        }

    @property
    def data_url(self) -> str:
        """The picture's file as a data URL. Only for a question with a picture."""
        assert self.picture is not None
        encoded = base64.b64encode(self.picture.read_bytes()).decode()
        return f"data:image/png;base64,{encoded}"


TEXT_QUESTIONS = (
    Question("Count from 62 to 89."),
    Question(
        '{"pan": "Gina", "rain": "Zoe", "lemon": "Finn", "piano": "Nora", "drum": "Yara", '
        '"mint": "Carl"} What is drum, piano, mint, lemon, rain, pan?'
    ),
    Question("Write JSON with age 61, shoe 28, name Paul, city Tokyo."),
    Question("Sort: o r n i a z l v"),
    Question("Reverse: sand rose seed cherry eagle fox bridge cloud"),
)
"""Held-out prompts of the tasks in `checkpoints/recipes/tasks.py`. The first one has the longest
answer."""

PICTURE_QUESTIONS = (
    Question("Add the two numbers.", _PICTURES / "add.png"),
    Question("How many red stars?", _PICTURES / "count.png"),
    Question("What number is shown?", _PICTURES / "row.png"),
)
"""Questions of checkpoints/held_out_images.jsonl."""


def questions_for(checkpoint: Path) -> Sequence[Question]:
    """Returns the demo's questions for a checkpoint. Those about pictures come first, if it takes
    images: if it has a vision tower and the settings of an image processor."""
    has_tower = read_json(checkpoint / "config.json").get("vision_config") is not None
    if has_tower and any(checkpoint.glob("*processor_config.json")):
        return (*PICTURE_QUESTIONS, *TEXT_QUESTIONS)
    return TEXT_QUESTIONS
