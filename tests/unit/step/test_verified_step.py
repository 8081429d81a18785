"""Drafts that the same weights verify: what is emitted, and with what the next one begins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.step.worker import CONTEXT, MASK, C, Worker, noise, sure
from vllm_dllm.step.masked.seeded_step import VerifiedStep

GetWorker = Callable[..., Worker]
joining = pytest.mark.parametrize("joins", [True, False], ids=["joins", "runs ahead"])


def made(
    worker: GetWorker, joins: bool = True, mode: str = "self_speculation", **asked: Any
) -> Worker:
    """With a request whose prompt foretells 21."""
    one = worker(VerifiedStep, "NemotronLabsDiffusionModel", joins_commits=joins)
    admit(one, "a", mode, **asked)
    one.step({"a": torch.cat([noise(C - 1), sure([21])])})
    return one


def admit(one: Worker, req_id: str, mode: str, **asked: Any) -> None:
    width = {"canvas_length": 1} if mode == "autoregressive" else {}
    one.admit(req_id, computed=0, diffusion_mode=mode, carried=width, temperature=0.0, **asked)


@joining
@pytest.mark.parametrize(
    ("behind", "emitted", "following"),
    [
        ([99, 98, 97, 96], [21], 99),
        ([22, 98, 24, 96], [21, 22], 98),
        ([22, 23, 97, 25], [21, 22, 23], 97),
        ([22, 23, 24, 25], [21, 22, 23, 24], 25),
    ],
    ids=["nothing else", "a part", "all but the last", "all"],
)
def test_a_draft_stands_as_far_as_it_is_what_is_drawn(
    worker: GetWorker, joins: bool, behind: list[int], emitted: list[int], following: int
) -> None:
    one = made(worker, joins)
    found = one.step({"a": sure([9, 22, 23, 24])})
    assert found.emitted == {"a": []} and found.rejected == {"a": C}
    assert one.canvas("a") == [21, 22, 23, 24]
    found = one.step({"a": sure(behind)})
    assert found.emitted == {"a": emitted} and found.rejected == {"a": C - len(emitted)}
    assert one.canvas("a") == [following, MASK, MASK, MASK]
    one.step({"a": sure([9, 32, 33, 34])})
    assert one.canvas("a") == [following, 32, 33, 34]


@joining
def test_token_by_token(worker: GetWorker, joins: bool) -> None:
    """A canvas of one row is never drafted."""
    one = made(worker, joins, "autoregressive")
    for token in (22, 23, 24):
        found = one.step({"a": sure([token])})
        assert found.emitted == {"a": [token - 1]} and found.rejected == {"a": 0}
    assert one.answer("a") == [21, 22, 23]


@joining
@pytest.mark.parametrize("asked", [{"eos": 23}, {"max_tokens": 3}], ids=["stop token", "length"])
@pytest.mark.parametrize("mode", ["self_speculation", "autoregressive"])
def test_a_token_that_ends_the_answer_needs_no_forward(
    worker: GetWorker, joins: bool, mode: str, asked: dict[str, Any]
) -> None:
    one = made(worker, joins, mode, **asked)
    if mode == "self_speculation":
        one.step({"a": sure([9, 22, 99, 98])})
        found = one.step({"a": sure([22, 23, 97, 96])})
    else:
        one.step({"a": sure([22])})
        found = one.step({"a": sure([23])})
    assert found.emitted["a"][-2:] == [22, 23] and one.answer("a") == [21, 22, 23]


@joining
def test_a_first_token_that_ends_the_answer_is_not_drafted_behind(
    worker: GetWorker, joins: bool
) -> None:
    """Where the forward that foretold it could not show it."""
    one = made(worker, joins, eos=21)
    assert one.step({"a": sure([9, 22, 23, 24])}).emitted == {"a": [21]}


@joining
def test_a_step_of_too_few_rows_is_taken_back(worker: GetWorker, joins: bool) -> None:
    one = made(worker, joins)
    one.step({"a": sure([9, 22, 23, 24])})
    found = one.step({"a": sure([22, 23])})
    assert found.emitted == {"a": []} and found.rejected == {"a": 2}
    found = one.step({"a": sure([22, 98, 97, 96])})
    assert found.emitted == {"a": [21, 22]} and one.canvas("a")[0] == 98


def test_a_draft_ends_with_the_context(worker: GetWorker) -> None:
    one = worker(VerifiedStep, "NemotronLabsDiffusionModel")
    admit(one, "a", "self_speculation", prompt=CONTEXT - 2, max_tokens=9)
    one.step({"a": torch.cat([noise(CONTEXT - 3), sure([21])])})
    one.step({"a": sure([9, 22])})
    assert one.step({"a": sure([22, 23])}).emitted == {"a": [21, 22]}


@joining
def test_modes_share_a_step(worker: GetWorker, joins: bool) -> None:
    one = worker(VerifiedStep, "NemotronLabsDiffusionModel", joins_commits=joins)
    one.admit("diffusion", computed=0, diffusion_accept_probability=0.9, seed=3)
    admit(one, "drafts", "self_speculation")
    admit(one, "one by one", "autoregressive")
    prompt = torch.cat([noise(C - 1), sure([21])])
    one.step(dict.fromkeys(one.requests, prompt))
    first = {"diffusion": sure([21, 22, 23, 24]), "drafts": sure([9, 22, 23, 24])}
    found = one.step({**first, "one by one": sure([22])})
    assert found.emitted["drafts"] == [] and found.emitted["one by one"] == [21]
    assert found.emitted["diffusion"] == ([21, 22, 23, 24] if joins else [])
    commit = torch.cat([noise(C - 1), sure([31])])
    second = {"diffusion": commit, "drafts": sure([22, 98, 97, 96])}
    one.step({**second, "one by one": sure([23])})
    assert one.answer("diffusion") == [21, 22, 23, 24]
    assert one.canvas("diffusion") == [31, MASK, MASK, MASK]
    assert one.answer("drafts") == [21, 22] and one.canvas("drafts") == [98, MASK, MASK, MASK]
    assert one.answer("one by one") == [21, 22]


def test_both_modes_draw_a_position_by_the_same_number(worker: GetWorker) -> None:
    """So that a seed has one answer."""
    firsts = set()
    for seed in range(6):
        answers = []
        for mode in ("self_speculation", "autoregressive"):
            one = worker(VerifiedStep, "NemotronLabsDiffusionModel")
            width = {"canvas_length": 1} if mode == "autoregressive" else {}
            one.admit("a", computed=0, diffusion_mode=mode, carried=width, seed=seed)
            one.step({"a": noise(C)})
            says = {position: noise(1, seed=position) for position in range(40)}  # of its row
            while len(one.answer("a")) < 6:
                start, length = one.requests["a"].computed, C if mode[0] == "s" else 1
                one.step({"a": torch.cat([says[start + i] for i in range(length)])})
            answers.append(one.answer("a")[:6])
        assert answers[0] == answers[1]
        firsts.add(answers[0][0])
    assert len(firsts) > 1
