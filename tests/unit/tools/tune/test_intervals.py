"""Intervals of accuracies, and of differences between two."""

import numpy as np
import pytest
from scipy.stats import binomtest

from vllm_dllm.tools.tune.report import difference_interval, mean_interval


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 40), (31, 40), (253, 253)])
def test_wilson(right: int, count: int) -> None:
    found = mean_interval([1.0] * right + [0.0] * (count - right))
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.low <= found.value == right / count <= found.high


def test_the_difference_holds_in_19_of_20_draws() -> None:
    """Of prompts that get worse and better by chance, the true difference is inside."""
    generator = np.random.default_rng(0)
    shares, draws, inside = (0.04, 0.01, 0.95), 2000, 0
    for _ in range(draws):
        change = generator.choice((-1.0, 1.0, 0.0), size=250, p=shares)
        before = np.where(change == 0, 1.0, (change < 0).astype(float))
        interval = difference_interval(before + change, before)
        inside += interval.low <= 0.01 - 0.04 <= interval.high
    assert inside >= 0.95 * draws


def test_equal_answers() -> None:
    """Nothing has changed, but that says only so much of other prompts."""
    interval = difference_interval([1.0] * 100, [1.0] * 100)
    assert interval.value == 0.0
    assert interval.low == -interval.high < 0.0
