"""Steps and pictures that the tests of the demo draw."""

import json

from PIL import Image

from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.steps import Step
from vllm_dllm.tools.pretrain.tokenizer import EOS_ID, build_tokenizer

TOKENIZER = build_tokenizer()
TEXTS = drawing.TokenTexts(TOKENIZER.backend_tokenizer)

RED, BLACK, GREY, WHITE = (255, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)
PIXELS = Image.new("RGB", (2, 3))
PIXELS.putdata([RED, WHITE, BLACK, WHITE, GREY, WHITE])


def token(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text, add_special_tokens=False)
    return token_id


def step_fields(
    number: int, guess: list[str], accepted: list[int], canvas: list[str], entropy: float
) -> dict[str, object]:
    """One line of the trace; an empty text stands for the end of the turn."""
    return {
        "request_id": "chatcmpl-demo-1-0a1b2c3d",
        "step": number,
        "tokens": [token(text) if text else EOS_ID for text in guess],
        "accepted": accepted,
        "canvas": [token(text) if text else EOS_ID for text in canvas],
        "entropy": entropy,
        "finished": all(accepted),
    }


RECORDED = [
    step_fields(1, ["cat", " ", "house", ""], [1, 0, 0, 1], ["cat", "moon", "sun", ""], 1.25),
    step_fields(2, ["cat", " ", "dog", ""], [1, 1, 0, 1], ["cat", " ", "x", ""], 0.5),
    step_fields(3, ["cat", " ", "dog", ""], [1, 1, 1, 1], ["cat", " ", "dog", ""], 0.001),
]


def steps(*lines: dict[str, object]) -> list[Step]:
    return [Step.from_line(json.dumps(line).encode()) for line in lines]
