"""What of a canvas stands where."""

import pytest

from checkpoints.recipes.tokenizer import PAD_ID
from tests.unit.tools.demo.recorded import RECORDED, TEXTS, TOKENIZER, steps, token
from vllm_dllm.tools.demo import drawing


@pytest.mark.parametrize(
    ("token_id", "text"),
    [
        pytest.param(token("house"), "house", id="word"),
        pytest.param(token(" "), " ", id="space"),
        pytest.param(token("\n"), "⏎", id="newline"),
        pytest.param(token("\x07"), "▒", id="control"),
        pytest.param(TOKENIZER.encode("é", add_special_tokens=False)[0], "▒", id="half-character"),
        pytest.param(PAD_ID, "·", id="pad"),
        pytest.param(len(TOKENIZER) - 1, "·", id="unused"),
    ],
)
def test_token_texts(token_id: int, text: str) -> None:
    assert TEXTS[token_id] == text


def test_cells() -> None:
    first, second, third = steps(*RECORDED)
    assert drawing.cells(first, TEXTS) == [
        ("cat", drawing.ACCEPTED),
        ("moon", drawing.OPEN),
        ("house", drawing.OPEN),
        ("·", drawing.ACCEPTED),
    ]
    assert drawing.cells(second, TEXTS)[1:3] == [(" ", drawing.ACCEPTED), ("sun", drawing.OPEN)]
    assert {style for _, style in drawing.cells(third, TEXTS)} == {drawing.FINISHED}


def test_flow_breaks_between_cells() -> None:
    lines = drawing.flow([("cat", ""), (" ", ""), ("house", ""), ("·", ""), ("xy", "")], 6)
    assert [line.plain for line in lines] == ["cat ", "house·", "xy"]
    assert [line.plain for line in drawing.flow([("longer", ""), ("b", "")], 3)] == ["longer", "b"]


@pytest.mark.parametrize(
    ("entropy_nats", "filled"), [(0.0, 0), (1e-6, 1), (0.25, 10), (1.0, 20), (7.0, 20)]
)
def test_entropy_bar(entropy_nats: float, filled: int) -> None:
    bar = drawing.entropy_bar(entropy_nats, max_entropy_nats=1.0)
    assert bar == "█" * filled + "░" * (20 - filled)
