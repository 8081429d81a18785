"""How wide each policy drafts, and settings that make no sense."""

import pickle
from typing import Any

import pytest
import torch

from vllm_dllm.config import ExtensionConfig
from vllm_dllm.drafters.config import DrafterConfig
from vllm_dllm.drafters.width import ByAcceptance, ByLoad, Predicted, make_policy


def test_fixed_is_all_that_is_drafted_unless_said_otherwise() -> None:
    assert make_policy(DrafterConfig(), 15).width("a", 1) == 15
    assert make_policy(DrafterConfig(width=7), 15).width("a", 64) == 7


def test_acceptance_narrows_under_60_percent_and_widens_over_90() -> None:
    policy = ByAcceptance(15, least_accepted=0.5)
    assert policy.width("a", 1) == 15
    policy.verified("a", 15, 2)  # of this and the good start, 57% on average
    assert policy.width("a", 1) == 11
    policy.verified("a", 11, 3)
    assert policy.width("a", 1) == 8
    # Between the two, nothing changes; the share follows with a delay.
    policy.verified("a", 8, 8)
    assert policy.width("a", 1) == 8
    for _ in range(4):
        policy.verified("a", 8, 8)
    assert policy.width("a", 1) > 8
    assert policy.width("b", 1) == 15, "requests are judged apart"


def test_acceptance_stays_between_one_and_the_widest() -> None:
    policy = ByAcceptance(4, least_accepted=0.0)
    for _ in range(9):
        policy.verified("a", policy.width("a", 1), 0)
    assert policy.width("a", 1) == 1
    for _ in range(99):
        policy.verified("a", policy.width("a", 1), policy.width("a", 1))
    assert policy.width("a", 1) == 4


def test_acceptance_pauses_where_drafts_do_not_pay() -> None:
    policy = ByAcceptance(15, least_accepted=0.5)
    while policy.width("a", 1):
        policy.step_scheduled()
        policy.verified("a", policy.width("a", 1), 0)
    tries = []
    for step in range(200):
        policy.step_scheduled()
        if width := policy.width("a", 1):
            tries.append(step)
            policy.verified("a", width, 0)
    assert len(tries) == 3 and tries[1] - tries[0] == policy.TRY_EVERY
    # One good try, and it drafts again.
    while not policy.width("a", 1):
        policy.step_scheduled()
    policy.verified("a", policy.width("a", 1), policy.width("a", 1))
    policy.step_scheduled()
    assert policy.width("a", 1)


def test_acceptance_starts_new_requests_as_the_last_ones_fared() -> None:
    policy = ByAcceptance(15, least_accepted=0.5)
    for request in range(100):
        policy.verified(str(request), 15, 0)
    policy.step_scheduled()
    assert policy.width("new", 1) == 0
    for request in range(100):
        policy.verified(str(request), 15, 9)
    assert policy.width("newer", 1) == 15


def test_acceptance_forgets_requests_that_ended() -> None:
    policy = ByAcceptance(15, least_accepted=0.5)
    policy.verified("a", 15, 0)
    policy.ended("a")
    assert policy.width("a", 1) == 15


@pytest.mark.parametrize(
    ("num_requests", "width"), [(1, 15), (8, 15), (9, 13), (16, 7), (64, 1), (65, 0), (200, 0)]
)
def test_load_shares_the_rows(num_requests: int, width: int) -> None:
    assert ByLoad(15, num_rows=128).width("a", num_requests) == width


def test_the_predictor_speaks_once_a_request() -> None:
    policy = Predicted(15)
    assert policy.width("a", 1) == 15
    policy.predicted("a", 9)
    policy.predicted("a", 12)  # a preempted request's second prefill
    assert policy.width("a", 1) == 9
    policy.predicted("b", 99)
    assert policy.width("b", 1) == 15
    policy.ended("a")
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
        ({"widths": 3}, r"drafter must be an object with the keys \[.*got \{'widths': 3\}"),
        ("load", "drafter must be an object"),
        ({"width_policy": "wide"}, r"width_policy must be one of \['fixed', .*got 'wide'"),
        ({"schedule": "square"}, r"schedule must be one of \['cosine', 'linear', 'sqrt'\]"),
        ({"width": 0}, "drafter.width must be an integer >= 1, got 0"),
        ({"max_context": True}, "drafter.max_context must be an integer >= 1, got True"),
        ({"draft_window": 1.5}, "drafter.draft_window must be an integer >= 1, got 1.5"),
        ({"load_rows": None}, "drafter.load_rows must be an integer >= 1, got None"),
        ({"least_accepted": -1}, "drafter.least_accepted must be a number >= 0, got -1"),
        ({"narrow_draft": 1}, "drafter.narrow_draft must be true or false, got 1"),
        ({"buffer_every": 0}, "drafter.buffer_every must be an integer >= 1, got 0"),
        ({"width_policy": "blockpilot"}, "come together; got 'blockpilot' and None"),
        ({"predictor": "here"}, "come together; got 'fixed' and 'here'"),
    ],
)
def test_settings_that_make_no_sense(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(section)


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
    from vllm_dllm.drafters.dflash import PredictedWidths

    sent = PredictedWidths(["a", "b"], torch.tensor([3, 15]))
    assert pickle.loads(pickle.dumps(sent)) == dict(sent) == {"a": 3, "b": 15}
