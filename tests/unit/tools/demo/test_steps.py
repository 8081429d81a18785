"""What of a canvas stands where."""

import pytest

from tests.unit.tools.demo.recorded import RECORDED, event, steps
from vllm_dllm.tools.demo import drawing


def test_cells() -> None:
    first, second, third = steps(*RECORDED)
    assert drawing.position_cells(first) == [
        ("cat", drawing.ACCEPTED),
        ("moon", drawing.OPEN),
        ("house", drawing.OPEN),
        ("·", drawing.ACCEPTED),
    ]
    assert drawing.position_cells(second)[1:3] == [(" ", drawing.ACCEPTED), ("sun", drawing.OPEN)]
    assert {style for _, style in drawing.position_cells(third)} == {drawing.FINISHED}
    (odd,) = steps(event(1, ["\n", "\x07", "\ufffd", ""], [1, 1, 1, 1], 0.0))
    assert [text for text, _ in drawing.position_cells(odd)] == ["⏎", "▒", "▒", "·"]


def test_flow_breaks_between_cells() -> None:
    lines = drawing.wrap_cells([("cat", ""), (" ", ""), ("house", ""), ("·", ""), ("xy", "")], 6)
    assert [line.plain for line in lines] == ["cat ", "house·", "xy"]
    assert [line.plain for line in drawing.wrap_cells([("longer", ""), ("b", "")], 3)] == [
        "longer",
        "b",
    ]


@pytest.mark.parametrize(
    ("entropy_nats", "filled"), [(0.0, 0), (1e-6, 1), (1.75, 10), (7.0, 20), (9.0, 20)]
)
def test_entropy_bar(entropy_nats: float, filled: int) -> None:
    assert drawing.entropy_bar(entropy_nats) == "█" * filled + "░" * (20 - filled)
