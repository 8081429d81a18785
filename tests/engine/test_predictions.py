"""What the shipped model makes of predictions: the same answers, in fewer steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams

from tests.engine.conftest import HELD_OUT, TRAINED, GetEngine

pytestmark = pytest.mark.numerics

# Of every task, and two that need several canvases.
CHOSEN = [*HELD_OUT[::60], *[row for row in HELD_OUT if row["task"] == "count_up"][:2]]

# Long ones, of the kind that the model learned.
COUNTS = [
    {"messages": [{"role": "user", "content": f"Count from {first} to {first + 30}."}]}
    for first in range(29, 69, 10)
]

Answers = list[tuple[str, int]]
"""Texts, and denoise steps."""


@pytest.fixture(scope="module")
def answer(engine: GetEngine) -> Callable[..., Answers]:
    served = engine(Path(TRAINED), diffusion_config={"canvas_length": 64})

    def run(predictions: list[str | None], rows: list[dict[str, Any]] | None = None) -> Answers:
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=192,
                seed=seed,
                extra_args={"diffusion_prediction": prediction},
            )
            for seed, prediction in enumerate(predictions)
        ]
        chats = [row["messages"] for row in rows or CHOSEN]
        outputs: list[RequestOutput] = served.llm.chat(chats, params, use_tqdm=False)
        return [(one.outputs[0].text, len(served.steps(one.request_id))) for one in outputs]

    return run


@pytest.fixture(scope="module")
def unpredicted(answer: Callable[..., Answers]) -> Answers:
    return answer([None] * len(CHOSEN))


def test_a_right_prediction_saves_steps(
    answer: Callable[..., Answers], unpredicted: Answers
) -> None:
    found = answer([text for text, _ in unpredicted])
    for (text, steps), (expected, before) in zip(found, unpredicted, strict=True):
        assert text == expected
        assert steps < before
    assert sum(steps for _, steps in found) < 0.6 * sum(steps for _, steps in unpredicted)


def test_a_wrong_prediction_changes_no_answer(
    answer: Callable[..., Answers], unpredicted: Answers
) -> None:
    texts = [text for text, _ in unpredicted]
    found = answer([*texts[1:], texts[0]])
    assert [text for text, _ in found] == texts
    assert any(steps >= before for (_, steps), (_, before) in zip(found, unpredicted, strict=True))


def test_an_answer_with_more_than_its_prediction(answer: Callable[..., Answers]) -> None:
    """Of several blocks, and one number more: the rest of its block and the next ones follow."""
    unpredicted = answer([None] * len(COUNTS), COUNTS)
    texts = [text for text, _ in unpredicted]
    numbers = [text.split() for text in texts]
    found = answer([" ".join(some[:8] + some[9:]) for some in numbers], COUNTS)
    assert [text for text, _ in found] == texts
    steps, before = (sum(count for _, count in some) for some in (found, unpredicted))
    assert steps <= 0.75 * before
