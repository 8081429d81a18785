"""Whose turn it is, as names of requests in the order of the scheduler's lists."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.compat.scheduler import http_request_id
from vllm_dllm.scheduling.fair_share import REMEMBERED_STEPS, FairShare


@pytest.fixture
def share() -> FairShare:
    return FairShare(canvases=2, places=4)


def requests(names: str) -> list[Any]:
    """Letters stand for HTTP requests; each letter is an answer of its own."""
    return [
        SimpleNamespace(request_id=f"{i}_chatcmpl-{name}-0123abcd") for i, name in enumerate(names)
    ]


def places(found: list[Any]) -> list[int]:
    return [int(request.request_id.partition("_")[0]) for request in found]


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


def test_names() -> None:
    same = ["cmpl-x-0-0123abcd", "cmpl-x-11-89abcdef", "7_cmpl-x-0-0123abcd"]
    assert {http_request_id(name) for name in same} == {"cmpl-x"}
    chats = ["chatcmpl-my-7-0123abcd", "chatcmpl-my-8-89abcdef", "1_chatcmpl-my-8-89abcdef"]
    assert [http_request_id(name) for name in chats] == [
        "chatcmpl-my-7",
        "chatcmpl-my-8",
        "chatcmpl-my-8",
    ]
    assert http_request_id("5") == "5"
