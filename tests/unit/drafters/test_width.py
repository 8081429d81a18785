"""How wide each policy drafts, what it learns of steps' costs, what each step of several reveals,
and settings that make no sense."""

import math
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import tolerances
from vllm_dllm.config.drafter import DrafterConfig, context_limit
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.drafters.passes import SCHEDULES, choose_revealed, reveal_counts
from vllm_dllm.drafters.step_costs import Step, StepClock, StepCosts
from vllm_dllm.drafters.width import AcceptanceWidth, LoadWidth, PredictedWidth, make_policy


def test_fixed_is_all_that_is_drafted_unless_said_otherwise() -> None:
    assert make_policy(DrafterConfig(), 15).width("a", 1) == 15
    assert make_policy(DrafterConfig(width=7), 15).width("a", 64) == 7


def run(
    policy: AcceptanceWidth,
    accepted: dict[str, int],  # of each request's drafts, as many tokens as are verified
    steps: int = 1,
    seconds: tuple[float, float, float] = (0.0, 0.005, 0.0),  # a step, a request, a row of a draft
) -> list[dict[str, int]]:
    """The widths of each step. A draft takes 6 ms a request."""
    base, each, row = seconds
    widths: list[dict[str, int]] = []
    for _ in range(steps):
        policy.step_scheduled(list(accepted), len(accepted))
        widths.append({name: policy.width(name, len(accepted)) for name in accepted})
        drafted = [name for name, width in widths[-1].items() if width]
        rows = sum(widths[-1].values())
        took = base + each * len(accepted) + row * rows + 0.006 * len(drafted)
        policy.step_timed(Step(len(accepted) + rows, 0, len(drafted)), took)
        for name in drafted:
            policy.draft_verified(name, widths[-1][name], min(accepted[name], widths[-1][name]))
    return widths


def test_acceptance_narrows_under_60_percent_and_widens_over_90() -> None:
    policy = AcceptanceWidth(15)
    assert run(policy, {"a": 2}) == [{"a": 15}]  # of this and the good start, 57% on average
    assert run(policy, {"a": 3}) == [{"a": 11}]
    # Between the two, nothing changes; the share follows with a delay.
    assert run(policy, {"a": 8}, 2) == [{"a": 8}, {"a": 8}]
    run(policy, {"a": 15}, 6)
    assert policy.width("a", 1) > 8
    run(policy, {"a": 15, "b": 15})
    assert policy.width("b", 1) == 15, "requests are judged apart"


def test_acceptance_stays_between_one_and_the_widest() -> None:
    policy = AcceptanceWidth(4)
    for _ in range(9):
        run(policy, {"a": 0})
        assert 1 <= policy._history("a").width <= 4
    for _ in range(99):
        run(policy, {"a": 4})
        assert 1 <= policy._history("a").width <= 4


def drafted(widths: list[dict[str, int]], name: str) -> list[int]:
    return [step for step, by_name in enumerate(widths) if by_name[name]]


def test_acceptance_pauses_where_drafts_do_not_pay() -> None:
    """A draft takes 6 for a step's 5: two tokens of a draft pay for it, one does not."""
    policy = AcceptanceWidth(15)
    run(policy, {"a": 1}, 100)
    tries = drafted(run(policy, {"a": 1}, 2000), "a")
    assert 2 <= len(tries) <= 5, "ever less often"
    assert tries[-1] - tries[-2] == policy.TRY_LEAST
    # One good try, and it drafts again, all but every step.
    run(policy, {"a": 2}, 2 * policy.TRY_LEAST)
    assert len(drafted(run(policy, {"a": 2}, 500), "a")) >= 495


def test_acceptance_goes_without_where_the_batch_is_too_full() -> None:
    """A step of one request is nearly free for more of them, so that its rows have to be many to
    count."""
    policy = AcceptanceWidth(15)
    seconds = (0.02, 0.0004, 0.0004)
    alone, many = {"0": 2}, {str(i): 2 for i in range(32)}
    for _ in range(8):
        run(policy, alone, 10, seconds)
        run(policy, many, 10, seconds)
    alone_drafted = drafted(run(policy, alone, 50, seconds), "0")
    many_drafted = sum(sum(map(bool, step.values())) for step in run(policy, many, 50, seconds))
    assert len(alone_drafted) >= 48
    assert many_drafted < 0.1 * 50 * len(many)


def test_acceptance_leaves_out_the_requests_that_do_not_pay() -> None:
    policy = AcceptanceWidth(15)
    accepted = {"good": 12, "bad": 0}
    run(policy, accepted, 100)
    widths = run(policy, accepted, 10 * policy.TRY_EVERY)
    assert len(drafted(widths, "good")) > 9.9 * policy.TRY_EVERY
    assert len(drafted(widths, "bad")) == 10
    assert {widths[step]["bad"] for step in drafted(widths, "bad")} == {15}, "a try is a full one"


def test_acceptance_starts_new_requests_as_the_last_ones_fared() -> None:
    policy = AcceptanceWidth(15)
    run(policy, {"a": 0}, 200)
    assert not run(policy, {"new": 0})[0]["new"]
    run(policy, {"a": 9}, 2 * policy.TRY_LEAST)
    assert run(policy, {"newer": 9})[0]["newer"]


def test_acceptance_forgets_requests_that_ended() -> None:
    policy = AcceptanceWidth(15)
    run(policy, {"a": 2})
    assert policy._history("a").width == 11
    policy.request_ended("a")
    assert policy._history("a").width == 15


@pytest.mark.parametrize(
    ("num_requests", "width"), [(1, 15), (8, 15), (9, 13), (16, 7), (64, 1), (65, 0), (200, 0)]
)
def test_load_shares_the_rows(num_requests: int, width: int) -> None:
    assert LoadWidth(15, num_rows=128).width("a", num_requests) == width


def test_the_predictor_speaks_once_a_request() -> None:
    policy = PredictedWidth(15)
    assert policy.width("a", 1) == 15
    policy.width_predicted("a", 9)
    policy.width_predicted("a", 12)  # a preempted request's second prefill
    assert policy.width("a", 1) == 9
    policy.width_predicted("b", 99)
    assert policy.width("b", 1) == 15
    policy.request_ended("a")
    assert policy.width("a", 1) == 15


def read(section: Any) -> DrafterConfig:
    return ExtensionConfig.from_additional_config({"vllm_dllm": {"drafter": section}}).drafter


def test_settings_are_read() -> None:
    assert read({"width_policy": "load", "load_rows": 32}) == DrafterConfig(
        width_policy="load", load_rows=32
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"widths": 3}, r"drafter.widths is not known. Did you mean drafter.width\?"),
        ("load", "drafter must be an object with the keys .*'narrow_draft', .* got 'load'"),
        ({"width_policy": "wide"}, r"width_policy must be one of \['fixed', .*got 'wide'"),
        ({"schedule": "square"}, r"schedule must be one of \['cosine', 'linear', 'sqrt'\]"),
        ({"width": 0}, "drafter.width must be an integer >= 1 .*, got 0"),
        ({"max_context": True}, "drafter.max_context must be an integer >= 1 .*, got True"),
        ({"draft_window": 1.5}, "drafter.draft_window must be an integer >= 1 .*, got 1.5"),
        ({"load_rows": None}, "drafter.load_rows must be an integer >= 1 .*, got None"),
        ({"narrow_draft": 1}, "drafter.narrow_draft must be true or false, got 1"),
        ({"buffer_every": 0}, "drafter.buffer_every must be an integer >= 1 .*, got 0"),
        ({"width_policy": "blockpilot"}, "come together; got 'blockpilot' and None"),
        ({"predictor": "here"}, "come together; got 'fixed' and 'here'"),
    ],
)
def test_settings_that_make_no_sense(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(section)


def limit(
    max_context: int | None = None, max_model_len: int | None = None, **dflash_config: Any
) -> int:
    drafter = SimpleNamespace(model="drafter", hf_config=SimpleNamespace())
    if dflash_config:
        drafter.hf_config.dflash_config = dflash_config
    speculative = SimpleNamespace(draft_model_config=drafter, max_model_len=max_model_len)
    return context_limit(DrafterConfig(max_context=max_context), speculative, 4096)


def test_the_longest_request_is_the_drafters_longest_unless_said_otherwise() -> None:
    assert limit() == limit(mask_token_id=3) == limit(trained_context=9999) == 4096
    assert limit(trained_context=435) == limit(trained_context=435, max_model_len=500) == 435
    assert limit(max_model_len=64) == limit(max_model_len=64, trained_context=435) == 64
    assert limit(1000, trained_context=435) == 1000
    with pytest.raises(ValueError, match=r"trained_context of the drafter drafter .* got '435'"):
        limit(trained_context="435")


def test_no_more_is_verified_than_drafted() -> None:
    with pytest.raises(ValueError, match=r"width is 16, but num_speculative_tokens .* drafts 15"):
        make_policy(DrafterConfig(width=16), 15)


def test_narrow_blocks() -> None:
    from vllm_dllm.drafters.dflash import narrow_blocks

    lengths = torch.tensor([100, 100, 20, 0], dtype=torch.int32)
    widths = torch.tensor([15, 4, 2, 7], dtype=torch.int32)
    narrow_blocks(lengths, widths, num_drafted=15)
    assert lengths.tolist() == [100, 89, 16, 0]


def test_predicted_widths_arrive_in_another_process_as_numbers() -> None:
    from vllm_dllm.drafters.blockpilot import PredictedWidths

    sent = PredictedWidths(["a", "b"], torch.tensor([3, 15]))
    assert pickle.loads(pickle.dumps(sent)) == dict(sent) == {"a": 3, "b": 15}


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


@pytest.mark.numerics
@pytest.mark.parametrize("slow_share", [0.0, 0.1])
def test_costs_are_learnt(slow_share: float) -> None:
    costs = StepCosts()
    learn(costs, random.Random(0), slow_share)
    steps = [Step(1, 0, 0), Step(16, 0, 0), Step(16, 0, 1), Step(256, 0, 16)]
    found = [1000 * costs.predict_seconds(step.num_rows, step.num_drafted) for step in steps]
    assert found == pytest.approx([milliseconds(step) for step in steps], rel=tolerances.STEP_COSTS)


@pytest.mark.numerics
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


@pytest.mark.numerics
def test_costs_follow_a_machine_that_changes() -> None:
    costs = StepCosts()
    learn(costs, random.Random(0))
    for _ in range(4 * costs.MEMORY):
        for num_drafted in (0, 4):
            costs.add_step(Step(4, 0, num_drafted), 0.02 + 0.01 * num_drafted)
    found = [costs.predict_seconds(4, num_drafted) for num_drafted in (0, 4)]
    assert found == pytest.approx([0.02, 0.06], rel=tolerances.STEP_COSTS_OF_A_STEADY_MACHINE)


@pytest.mark.numerics
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


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, int, str]:
    num_masked = draw(st.integers(1, 128))
    return num_masked, draw(st.integers(1, num_masked)), draw(st.sampled_from(list(SCHEDULES)))


@pytest.mark.numerics
@given(blocks())
def test_counts_are_a_partition_of_the_block(case: tuple[int, int, str]) -> None:
    num_masked, num_steps, _ = case
    counts = reveal_counts(*case)
    assert len(counts) == num_steps and sum(counts) == num_masked and min(counts) >= 1


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("cosine", [1, 4, 5, 6]), ("linear", [4, 4, 4, 4]), ("sqrt", [2, 3, 3, 8])],
)
def test_counts_of_16_positions_in_4_steps(schedule: str, expected: list[int]) -> None:
    assert reveal_counts(16, 4, schedule) == expected


@pytest.mark.numerics
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_from_all_to_nothing(schedule: str) -> None:
    shares = [SCHEDULES[schedule](t / 20) for t in range(21)]
    assert shares[0] == 1 and shares[-1] == pytest.approx(
        0, abs=tolerances.unit_roundoff(torch.float64)
    )
    assert shares == sorted(shares, reverse=True)


@pytest.mark.numerics
def test_bad_input() -> None:
    for num_steps in (0, 17):
        with pytest.raises(ValueError, match=f"1 to 16 steps.*got {num_steps}"):
            reveal_counts(16, num_steps)


def by_loops(confidence: list[float], masked: list[bool], count: int) -> list[bool]:
    places = sorted((-c, i) for i, c in enumerate(confidence) if masked[i])
    chosen = {i for _, i in places[:count]}
    return [i in chosen for i in range(len(masked))]


@pytest.mark.numerics
def test_reveals_the_most_confident() -> None:
    confidence = torch.randint(5, (50, 16)).float().log()  # ties, and minus infinity
    masked = torch.rand(50, 16) < 0.6
    rows = list(zip(confidence.tolist(), masked.tolist(), strict=True))
    for count in (0, 1, 6, 16):
        expected = [by_loops(*row, count) for row in rows]
        assert choose_revealed(confidence, masked, count).tolist() == expected


@pytest.mark.numerics
def test_a_confidence_of_minus_infinity_is_revealed_last_but_revealed() -> None:
    confidence = torch.tensor([[-math.inf, 0.0, -math.inf]])
    masked = torch.tensor([[True, False, True]])
    assert choose_revealed(confidence, masked, 1).tolist() == [[True, False, False]]
    assert choose_revealed(confidence, masked, 2).tolist() == [[True, False, True]]
