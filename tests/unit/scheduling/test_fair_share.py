"""Whose turn it is, as names of requests in the order of the scheduler's lists."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.scheduling.fair_share import REMEMBERED_STEPS, FairShare


@pytest.fixture
def share() -> FairShare:
    return FairShare(canvases=2, places=4)


def requests(names: str) -> list[Any]:
    """Letters stand for HTTP requests; each letter is an answer of its own."""
    found = []
    for place, name in enumerate(names):
        params = SamplingParams()
        RequestOptions(http_request=name).store_in(params)
        found.append(SimpleNamespace(request_id=str(place), sampling_params=params))
    return found


def places(found: list[Any]) -> list[int]:
    return [int(request.request_id) for request in found]


@pytest.mark.parametrize(
    ("running", "waiting", "sit_out"),
    [
        ("", "", []),
        ("a", "", []),
        ("aaaa", "aa", []),  # nobody else is there
        ("aaaa", "ab", [2, 3]),
        ("aab", "", []),
        ("aaaab", "", [2, 3]),
        ("baaabbb", "", [3, 5, 6]),
        ("abcd", "", []),
    ],
)
def test_a_step_that_others_share(
    share: FairShare, running: str, waiting: str, sit_out: list[int]
) -> None:
    assert places(share.sitting_out(requests(running), requests(waiting))) == sit_out


@pytest.mark.parametrize(
    ("running", "waiting", "held"),
    [
        ("", "aaaaaa", [4, 5]),
        ("aaa", "aa", [1]),
        ("", "aaaaaab", [2, 3, 4, 5]),
        ("aaa", "abaac", [0, 2, 3]),
        ("aaaa", "bab", [1]),
        ("abc", "abc", []),
    ],
)
def test_places_are_left_for_others(
    share: FairShare, running: str, waiting: str, held: list[int]
) -> None:
    share.sitting_out(requests(running), requests(waiting))
    assert places(share.held_back(requests(running), requests(waiting))) == held


def test_who_asks_again_and_again_is_not_forgotten(share: FairShare) -> None:
    """In the gap between two requests of b, a takes its share and no more."""
    many, other = requests("aaaa"), requests("aaaab")
    assert places(share.sitting_out(many, [])) == []
    assert places(share.sitting_out(other, [])) == [2, 3]
    for _ in range(REMEMBERED_STEPS - 1):
        assert places(share.sitting_out(many, requests("a"))) == [2, 3]
        assert places(share.held_back(many, requests("a"))) == [0]
    assert places(share.sitting_out(many, [])) == []
    assert places(share.held_back(requests("aa"), requests("aaa"))) == [2]


def test_offline_each_is_a_request_of_its_own(share: FairShare) -> None:
    found = [
        SimpleNamespace(request_id=str(place), sampling_params=SamplingParams())
        for place in range(6)
    ]
    assert share.sitting_out(found, []) == share.held_back(found, found) == []
