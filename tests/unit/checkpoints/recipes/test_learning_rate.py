"""The learning rate warms up, holds and ends at zero."""

import pytest

from checkpoints.recipes.learning_rate import learning_rate_scale


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(0.0, 0.0), (0.01, 0.25), (0.04, 1.0), (0.5, 1.0), (0.8, 0.5), (1.0, 0.0)],
)
def test_shape(progress: float, expected: float) -> None:
    assert learning_rate_scale(progress, warmup=0.04, decay=0.4) == pytest.approx(expected)


def test_head_start_moves_the_warm_up_alone() -> None:
    shape = dict(warmup=0.02, decay=0.6, head_start=1e-3)
    assert learning_rate_scale(0.0, **shape) == pytest.approx(0.05)
    assert learning_rate_scale(0.7, **shape) == pytest.approx(0.5)
    assert learning_rate_scale(1.0, **shape) == 0.0
