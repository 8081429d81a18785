"""The model of a step is held against what was measured, and its pages say what it says."""

import pytest

from bench import roofline
from bench.full_shape import Cell
from bench.full_shape_engine import STOCK
from tests.paths import ROOT

CELLS = list(roofline.reproduced())


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.system} {c.scheme} {c.cell}")
def test_reproduces_what_was_measured(cell: roofline.Reproduced) -> None:
    assert abs(cell.error) <= 0.1


def test_every_measured_step_is_held_against() -> None:
    measured = {
        (scheme, system, cell)
        for scheme in roofline.PEAK
        for system, found in roofline.results("steps.json")[scheme].items()
        for cell in found["cells"]
    }
    assert {(c.scheme, c.system, c.cell) for c in CELLS} == measured
    assert len(measured) == 13


def test_stock_s_steps_with_even_routing_are_within_an_eighth() -> None:
    """They are no part of the model. Ours run other kernels than any that it knows."""
    measured = {(p.scheme, p.cell): p for p in roofline.predictions() if STOCK in p.measured}
    assert len(measured) == 7
    for each in measured.values():
        assert each.ms["stock"] == pytest.approx(each.measured[STOCK], rel=1 / 8)


@pytest.mark.parametrize("scheme", roofline.PEAK)
@pytest.mark.parametrize("system", roofline.SYSTEMS)
def test_no_step_is_below_the_floor_and_more_work_takes_longer(scheme: str, system: str) -> None:
    times = []
    for cell in (Cell(1, 0), Cell(1, 8192), Cell(8, 8192), Cell(32, 65_536)):
        times.append(sum(roofline.step(system, scheme, cell).values()))
        assert times[-1] > roofline.floor_ms(scheme, cell)
    assert times == sorted(times)


@pytest.mark.parametrize("lines", [roofline.measured_lines, roofline.predicted_lines])
def test_the_page_has_its_tables(lines: roofline.Lines) -> None:
    page = (ROOT / "docs" / "evidence" / "step-on-an-h200.md").read_text().splitlines()
    assert [line for line in lines() if line not in page] == []
