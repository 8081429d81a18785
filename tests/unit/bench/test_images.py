"""The bench of images reports nothing when answers are not the reference's."""

import pytest

from bench import harness, images
from tests import tolerances

EXPECTED = [[[-0.1, -2.0, -5.0], [-3.0, -0.2, -1.5]]]  # one prompt, two positions, three tokens


def read(off: float) -> list[list[tuple[list[int], list[float]]]]:
    return [[([0, 1], [-0.1, -2.0]), ([1, 2], [-0.2, -1.5 + off])]]


def test_refuses_a_step_that_is_not_transformers() -> None:
    within = tolerances.LOGPROB / 2
    assert images.require_same_step(read(within), EXPECTED) == pytest.approx(within)
    for off in (3 * tolerances.LOGPROB, float("nan")):
        with pytest.raises(harness.Refused, match="behind images"):
            images.require_same_step(read(off), EXPECTED)
    with pytest.raises(ValueError, match="shorter"):
        images.require_same_step(read(0.0), [EXPECTED[0][:1]])


def test_refuses_other_texts() -> None:
    run = {"outputs": [[1, 2], [3]]}
    images.require_same_text({images.OURS: run, images.WITHOUT: dict(run)})
    with pytest.raises(harness.Refused, match="with and without the tower"):
        images.require_same_text({images.OURS: run, images.WITHOUT: {"outputs": [[1, 2], [4]]}})
