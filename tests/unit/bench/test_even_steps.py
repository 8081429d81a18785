"""What today's kernels make of measured steps, and the page that says so."""

from bench import even_steps
from bench.full_shape_engine import OURS
from bench.roofline import results
from tests.paths import ROOT


def test_every_measured_step_is_there_and_is_faster_today() -> None:
    found = {step.cell: step for step in even_steps.steps()}
    assert set(found) == set(results("steps_even.json")["results"][OURS]["cells"])
    for step in found.values():
        assert 0.8 * step.ours < step.today < step.ours


def test_one_request_is_the_sum_of_what_was_measured() -> None:
    step = next(step for step in even_steps.steps() if step.cell == "1x128")
    assert abs(step.today - (13.17 - 8.20 + 30 * 0.2271 - 25 * (0.0291 - 0.0218))) < 0.01


def test_the_page_has_its_table() -> None:
    page = (ROOT / "docs" / "evidence" / "step-on-an-h200.md").read_text().splitlines()
    assert [line for line in even_steps.lines() if line not in page] == []
