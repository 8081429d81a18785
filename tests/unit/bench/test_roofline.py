"""The predictions keep to what cannot be otherwise, and say what they miss."""

import pytest

from bench import roofline
from bench.roofline import CHIPS, SCHEMES, Prediction, floor_s, step_s
from tests import tolerances
from tests.gpu_dry_run.test_launches import CANVAS, MOST, VOCABULARY

CASES = [(chip, scheme) for chip in CHIPS for scheme in SCHEMES]


@pytest.mark.parametrize(("chip", "scheme"), CASES)
def test_no_step_is_below_the_floor_and_more_work_takes_longer(chip: str, scheme: str) -> None:
    for system in roofline.SYSTEMS:
        times = []
        for batch, context in ((1, 0), (1, 8192), (8, 8192), (32, 65_536)):
            each = (CHIPS[chip], SCHEMES[scheme], batch, context)
            times.append(step_s(*each, system))
            assert times[-1] > floor_s(*each)
        assert times == sorted(times)


def test_weights_are_those_of_the_26b_model() -> None:
    scheme = roofline.Scheme(1, 1)
    found = {p.name: p for p in roofline.parts(CHIPS["H200"], scheme, 64, 0, "stock")}
    weights = found["projections"].num_bytes + found["experts"].num_bytes
    assert weights + found["LM head"].num_bytes / 2 == pytest.approx(25.2e9, rel=tolerances.COUNT)


def test_launches_are_those_of_the_dry_run() -> None:
    assert (roofline.CANVAS, roofline.VOCABULARY) == (CANVAS, VOCABULARY)
    assert roofline.launches(CANVAS, "ours") == MOST[1]
    # Requests of several kinds launch a few more than the model counts.
    assert 0.9 * MOST[4] <= roofline.launches(4 * CANVAS, "ours") <= MOST[4]


def test_the_model_can_be_wrong_about_what_was_published() -> None:
    """One unknown, how many forwards a canvas takes, cannot fit two chips."""
    found = roofline.calibrate()
    low, high = sorted(found.errors.values())
    assert low < 0 < high
    assert 1 < found.forwards <= 49


@pytest.mark.parametrize(
    ("prediction", "missed"),
    [
        (Prediction("bf16", 1, 0, ours_ms=10.0, stock_ms=13.0, floor_ms=9.0), []),
        (Prediction("bf16", 1, 0, ours_ms=10.0, stock_ms=12.0, floor_ms=9.0), ["1.25x stock"]),
        (Prediction("bf16", 8, 0, ours_ms=10.0, stock_ms=9.0, floor_ms=9.0), []),
        (
            Prediction("bf16", 32, 0, ours_ms=10.0, stock_ms=14.0, floor_ms=5.0),
            ["1.5x stock", "1.25x floor"],
        ),
    ],
)
def test_goals(prediction: Prediction, missed: list[str]) -> None:
    assert prediction.missed == missed
