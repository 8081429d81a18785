"""What steps take: learnt from samples, and timed only while the engine is busy."""

import random

import pytest

from tests import tolerances
from vllm_dllm.drafters.step_costs import Step, StepClock, StepCosts

pytestmark = pytest.mark.numerics


def milliseconds(step: Step) -> float:
    """The machine of these tests: a base, then something for each part."""
    drafts = 4 * (step.num_drafted > 0) + 0.5 * step.num_drafted
    return 5 + 0.1 * step.num_rows + 0.05 * step.num_prefilled + drafts


def learn(costs: StepCosts, rng: random.Random, slow_share: float = 0.0, count: int = 300) -> None:
    for _ in range(count):
        num_requests = rng.randint(1, 16)
        num_drafted = rng.choice([0, num_requests])
        num_rows = num_requests + 15 * rng.choice([0, num_requests])
        step = Step(num_rows, rng.choice([0, 0, 30]), num_drafted)
        slow = 8 if rng.random() < slow_share else 1
        costs.add_step(step, slow * milliseconds(step) * rng.gauss(1, 0.05) / 1000)


@pytest.mark.parametrize("slow_share", [0.0, 0.1])
def test_costs_are_learnt(slow_share: float) -> None:
    costs = StepCosts()
    learn(costs, random.Random(0), slow_share)
    steps = [Step(1, 0, 0), Step(16, 0, 0), Step(16, 0, 1), Step(256, 0, 16)]
    found = [1000 * costs.predict_seconds(step.num_rows, step.num_drafted) for step in steps]
    assert found == pytest.approx([milliseconds(step) for step in steps], rel=tolerances.STEP_COSTS)


def test_nothing_is_said_before_steps_of_both_kinds_were_seen() -> None:
    costs = StepCosts()
    for _ in range(99):
        costs.add_step(Step(16, 0, 1), 0.01)
    assert costs.lacks_steps_without_drafts
    assert not costs.are_known
    for _ in range(costs.LEAST):
        costs.add_step(Step(16, 0, 0), 0.006)
    assert not costs.lacks_steps_without_drafts
    assert costs.are_known


def test_costs_follow_a_machine_that_changes() -> None:
    costs = StepCosts()
    learn(costs, random.Random(0))
    for _ in range(4 * costs.MEMORY):
        for num_drafted in (0, 4):
            costs.add_step(Step(4, 0, num_drafted), 0.02 + 0.01 * num_drafted)
    found = [costs.predict_seconds(4, num_drafted) for num_drafted in (0, 4)]
    assert found == pytest.approx([0.02, 0.06], rel=tolerances.STEP_COSTS_OF_A_STEADY_MACHINE)


def test_the_clock_times_steps_of_a_busy_engine() -> None:
    times = iter([1.0, 1.5, 1.75, 9.0])
    clock = StepClock(lambda: next(times))
    steps = [Step(1, 0, 0), Step(16, 0, 1), Step(16, 0, 0), Step(1, 0, 1)]
    clock.step_scheduled(steps[0], {"a"})
    assert clock.step_answered() is None, "nothing was running before it"
    clock.step_scheduled(steps[1], {"a", "b"})
    clock.step_scheduled(steps[2], {"b"})  # two on their way: asynchronous scheduling
    assert clock.step_answered() == (steps[1], 0.5)
    assert clock.step_answered() == (steps[2], 0.25)
    clock.step_scheduled(steps[3], {"c"})  # b had ended: the engine may have waited for c
    assert clock.step_answered() is None
