"""Whose turn it is, where parts of prompts end, how wide canvases are, and steps that wait for no
grammar."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler

from tests.unit.step import worker
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.requests.options import OPTIONS_KEY, RequestOptions
from vllm_dllm.scheduling.fair_share import REMEMBERED_STEPS, FairShare
from vllm_dllm.scheduling.families import AlignedBlocks
from vllm_dllm.scheduling.prompts import end_before_image
from vllm_dllm.scheduling.scheduler import CanvasAsyncScheduler, CanvasScheduler, CanvasScheduling


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


def feature(offset: int, is_embed: list[bool]) -> SimpleNamespace:
    mask = torch.tensor(is_embed)
    return SimpleNamespace(mm_position=PlaceholderRange(offset, len(mask), mask))


MARKED = [False, *[True] * 4, False]  # an image or a frame, between its marks
IMAGES = [feature(offset, MARKED) for offset in (2, 8, 20)]
VIDEO = [feature(3, [False, *MARKED, False, False, *MARKED])]  # each frame behind its time


@pytest.mark.parametrize(
    ("end", "found"),
    [(0, 0), (2, 2), (3, 2), (7, 2), (8, 8), (9, 8), (14, 14), (19, 19), (25, 20), (26, 26)],
)
def test_never_inside_an_image(end: int, found: int) -> None:
    assert end_before_image(IMAGES, end) == found


@pytest.mark.parametrize(
    ("end", "found"),
    [(3, 3), (4, 4), (5, 4), (9, 4), (10, 10), (11, 11), (12, 12), (13, 12), (17, 12), (18, 18)],
)
def test_between_the_frames_of_a_video(end: int, found: int) -> None:
    assert end_before_image(VIDEO, end) == found


def test_texts_end_anywhere() -> None:
    assert end_before_image([], 7) == 7


B, CONTEXT = 8, 110  # the context ends inside a block


def request(num_tokens: int, acceptance: str) -> Any:
    extra = {OPTIONS_KEY: {"acceptance": acceptance}}
    return SimpleNamespace(num_tokens=num_tokens, sampling_params=SimpleNamespace(extra_args=extra))


def family(in_flight: int) -> AlignedBlocks:
    config = worker.config(
        architecture="SDARForCausalLM",
        canvas_length=in_flight * B,
        context=CONTEXT,
        settings={"blocks_in_flight": in_flight},
    )
    config.compilation_config = SimpleNamespace(cudagraph_mode=None)
    return AlignedBlocks(config, in_flight * B, MaskedConfig.from_vllm_config(config))


@pytest.mark.parametrize("in_flight", [2, 4])
def test_a_copy_of_the_block_follows_a_canvas_that_is_verified(in_flight: int) -> None:
    """Where the context has room for it."""
    served = family(in_flight)
    for num_tokens, own, behind in ((0, 8, 8), (3, 5, 8), (88, 8, 8), (95, 1, 8), (96, 8, 0)):
        verified = request(num_tokens, "verified")
        assert served.num_answer_tokens(verified) == own
        assert served.canvas_width(verified) == own + behind
        assert served.is_partial_block(verified) == (own < B)
        usual = request(num_tokens, "confidence")
        width = in_flight * B - num_tokens % (in_flight * B)
        assert served.canvas_width(usual) == served.num_answer_tokens(usual) == width


def test_without_room_for_two_blocks_nothing_follows() -> None:
    """Such a server refuses the request."""
    assert family(1).canvas_width(request(3, "verified")) == 5


def test_a_session_computes_its_last_block_anew() -> None:
    """Its known tokens have seen positions that have changed."""
    scheduler: Any = SimpleNamespace(family=family(1))
    for num_tokens, computed, reused in ((30, 21, 16), (30, 24, 24), (30, 32, 24)):
        session: Any = SimpleNamespace(num_tokens=num_tokens, num_computed_tokens=computed)
        assert CanvasScheduling.num_computed_of_session(scheduler, session) == reused


@pytest.mark.parametrize("scheduler_cls", [CanvasScheduler, CanvasAsyncScheduler])
def test_no_step_waits_for_tokens_that_a_grammar_needs(
    scheduler_cls: type[CanvasScheduling], monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule(self: Scheduler, *args: Any) -> Any:
        return SimpleNamespace(
            has_structured_output_requests=True, pending_structured_output_tokens=True
        )

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    scheduler: Any = object.__new__(scheduler_cls)
    scheduler.running, scheduler.waiting, scheduler.current_step = [], [], 0
    scheduler.lora_config = None
    scheduler.fair_share = FairShare(2, 4)
    scheduler.structured_output_manager = "vLLM's"
    scheduler.set_block_check(lambda manager: f"ours, of {manager}")
    output = scheduler.schedule()
    assert scheduler.structured_output_manager == "ours, of vLLM's"
    assert not output.has_structured_output_requests
    assert not output.pending_structured_output_tokens
