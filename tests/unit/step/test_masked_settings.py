"""Settings of a masked model's requests, as a step finds them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from vllm_dllm.denoise.masked import Candidates, reveal_candidates
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings


def settings_of(num_slots: int, *, reveals_at_threshold: bool = False) -> MaskedSlotSettings:
    device = torch.device("cpu")
    return MaskedSlotSettings(num_slots, 3, device, reveals_at_threshold=reveals_at_threshold)


def asking(slot: int, num_steps: int = 3, temperature: float = 0.0, **wanted: Any) -> Any:
    params, options = SamplingParams(temperature=temperature), RequestOptions(**wanted)
    return SimpleNamespace(slot=slot, options=options, params=params, num_steps=num_steps)


def batch_of(*slots: int) -> Any:
    return SimpleNamespace(slot_index=torch.tensor(slots), slots_list=list(slots))


@pytest.mark.parametrize("reveals_at_threshold", [False, True])
@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_a_candidate_as_probable_as_the_threshold(
    threshold: float, reveals_at_threshold: bool
) -> None:
    """Revealed or not, as the model's loop has it; the next smaller number never is."""
    settings = settings_of(1, reveals_at_threshold=reveals_at_threshold)
    settings.add_request(asking(0, acceptance="confidence", accept_probability=threshold))
    settings.apply_staged_writes()
    rules = settings.for_batch(batch_of(0)).rules(torch.tensor([0]), torch.tensor([3]), 3)
    exact = np.float32(threshold)
    # The first is the one that each step reveals whatever it is.
    probability = torch.tensor([[2.0, exact, np.nextafter(exact, np.float32(0))]])
    candidates = Candidates(torch.zeros(1, 3, dtype=torch.int64), probability, torch.ones(1, 3))
    found = reveal_candidates(candidates, torch.ones(1, 3, dtype=torch.bool), rules)
    assert found.tolist() == [[True, reveals_at_threshold, False]]


CONFIDENCE = {"acceptance": "confidence", "accept_probability": 0.9}


@pytest.mark.parametrize(
    ("wanted", "left_in"),
    [
        ({}, set()),
        ({"num_steps": 2}, {"has_shares"}),
        ({"temperature": 1.0}, {"are_scaled"}),
        ({"acceptance": "in_order"}, {"in_order"}),
        ({"acceptance": "verified"}, {"is_verified"}),
        ({"acceptance": "entropy_bound", "entropy_bound": 1.0}, {"entropy_bound"}),
        ({"edit_probability": 0.5}, {"edit_threshold"}),
        ({"mode": "self_speculation", "edit_probability": 0.5}, {"is_verified"}),
    ],
    ids=str,
)
def test_what_no_request_asks_for_is_left_out(wanted: dict[str, Any], left_in: set[str]) -> None:
    settings = settings_of(3)
    for slot in (0, 1):
        settings.add_request(asking(slot, **CONFIDENCE))
    settings.add_request(asking(2, **{**CONFIDENCE, **wanted}))
    settings.apply_staged_writes()
    for slots, expected in (((0, 1), set()), ((0, 2, 1), left_in)):
        found = settings.for_batch(batch_of(*slots))
        optional = ("in_order", "entropy_bound", "edit_threshold", "is_verified")
        there = {name for name in optional if getattr(found, name) is not None}
        there |= {"has_shares"} if found.has_shares else set()
        there |= {"are_scaled"} if settings.are_scaled(batch_of(*slots)) else set()
        assert there == expected


def test_a_slot_has_the_settings_of_its_latest_request() -> None:
    settings = settings_of(2)
    for slot in range(2):
        settings.add_request(asking(slot, **CONFIDENCE))
    settings.apply_staged_writes()
    first = settings.for_batch(batch_of(0, 1))
    assert settings.for_batch(batch_of(0, 1)) is first
    assert settings.for_batch(batch_of(1, 0)) is not first
    settings.remove_request(1)
    settings.add_request(asking(1, acceptance="confidence", accept_probability=0.25))
    settings.apply_staged_writes()
    assert settings.for_batch(batch_of(0, 1)).threshold.tolist() == pytest.approx([0.9, 0.25])
    assert first.threshold.tolist() == pytest.approx([0.9, 0.9])
