"""Multi-step unmasking: what each step reveals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import tolerances
from vllm_dllm.drafters.passes import SCHEDULES, choose_revealed, reveal_counts

pytestmark = pytest.mark.numerics


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, int, str]:
    num_masked = draw(st.integers(1, 128))
    return num_masked, draw(st.integers(1, num_masked)), draw(st.sampled_from(list(SCHEDULES)))


@given(blocks())
def test_counts_are_a_partition_of_the_block(case: tuple[int, int, str]) -> None:
    num_masked, num_steps, _ = case
    counts = reveal_counts(*case)
    assert len(counts) == num_steps and sum(counts) == num_masked and min(counts) >= 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("cosine", [1, 4, 5, 6]), ("linear", [4, 4, 4, 4]), ("sqrt", [2, 3, 3, 8])],
)
def test_counts_of_16_positions_in_4_steps(schedule: str, expected: list[int]) -> None:
    assert reveal_counts(16, 4, schedule) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_from_all_to_nothing(schedule: str) -> None:
    shares = [SCHEDULES[schedule](t / 20) for t in range(21)]
    assert shares[0] == 1 and shares[-1] == pytest.approx(
        0, abs=tolerances.unit_roundoff(torch.float64)
    )
    assert shares == sorted(shares, reverse=True)


def test_bad_input() -> None:
    for num_steps in (0, 17):
        with pytest.raises(ValueError, match=f"1 to 16 steps.*got {num_steps}"):
            reveal_counts(16, num_steps)


def by_loops(confidence: list[float], masked: list[bool], count: int) -> list[bool]:
    places = sorted((-c, i) for i, c in enumerate(confidence) if masked[i])
    chosen = {i for _, i in places[:count]}
    return [i in chosen for i in range(len(masked))]


def test_reveals_the_most_confident() -> None:
    confidence = torch.randint(5, (50, 16)).float().log()  # ties, and minus infinity
    masked = torch.rand(50, 16) < 0.6
    rows = list(zip(confidence.tolist(), masked.tolist(), strict=True))
    for count in (0, 1, 6, 16):
        expected = [by_loops(*row, count) for row in rows]
        assert choose_revealed(confidence, masked, count).tolist() == expected


def test_a_confidence_of_minus_infinity_is_revealed_last_but_revealed() -> None:
    confidence = torch.tensor([[-math.inf, 0.0, -math.inf]])
    masked = torch.tensor([[True, False, True]])
    assert choose_revealed(confidence, masked, 1).tolist() == [[True, False, False]]
    assert choose_revealed(confidence, masked, 2).tolist() == [[True, False, True]]
