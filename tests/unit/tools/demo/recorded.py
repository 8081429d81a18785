"""Steps and pictures that the tests of the demo draw."""

from PIL import Image

from checkpoints.recipes.tokenizer import EOS_ID, build_tokenizer
from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.steps import Step

TOKENIZER = build_tokenizer()
TEXTS = drawing.TokenTexts(TOKENIZER.backend_tokenizer)

RED, BLACK, GREY, WHITE = (255, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)
PIXELS = Image.new("RGB", (2, 3))
PIXELS.putdata([RED, WHITE, BLACK, WHITE, GREY, WHITE])


def token(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text, add_special_tokens=False)
    return token_id


def event(number: int, guess: list[str], accepted: list[int], entropy: float) -> dict[str, object]:
    """What a stream says of one step; an empty text stands for the end of the turn."""
    return {
        "block": 0,
        "step": number,
        "tokens": [token(text) if text else EOS_ID for text in guess],
        "accepted": accepted,
        "mean_entropy": entropy,
        "finished": all(accepted),
    }


RECORDED = [
    event(1, ["cat", "moon", "house", ""], [1, 0, 0, 1], 1.25),
    event(2, ["cat", " ", "sun", ""], [1, 1, 0, 1], 0.5),
    event(3, ["cat", " ", "dog", ""], [1, 1, 1, 1], 0.001),
]


def steps(*events: dict[str, object]) -> list[Step]:
    return [Step.from_event(canvas) for canvas in events]
