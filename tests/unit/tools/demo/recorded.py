"""Steps and pictures that the tests of the demo draw."""

from PIL import Image

from vllm_dllm.tools.demo.drawing import Step

RED, BLACK, GREY, WHITE = (255, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)
PIXELS = Image.new("RGB", (2, 3))
PIXELS.putdata([RED, WHITE, BLACK, WHITE, GREY, WHITE])


def event(number: int, texts: list[str], accepted: list[int], entropy: float) -> dict[str, object]:
    """What a stream says of one step; an empty text stands for the end of the turn."""
    return {
        "block": 0,
        "step": number,
        "texts": texts,
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
