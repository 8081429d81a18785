"""Canvases whose first token the row before foretells: a prompt's last, or a finished block's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.unit.step.worker import MASK, C, V, Worker, noise, sure
from vllm_dllm.step.masked.drafting_step import ShiftedStep
from vllm_dllm.step.masked.masked_step import MaskedStep
from vllm_dllm.step.masked.seeded_step import VerifiedStep

GetWorker = Callable[..., Worker]
FAMILIES: dict[str, tuple[type[MaskedStep], str]] = {
    "causal": (VerifiedStep, "NemotronLabsDiffusionModel"),
    "shifted": (ShiftedStep, "Fast_dLLM_QwenForCausalLM"),
}
BLOCK, NEXT = [21, 22, 23, 24], [31, 32, 33, 34]


def made(worker: GetWorker, family: str, **options: Any) -> Worker:
    return worker(*FAMILIES[family], **options)


def admit(worker: Worker, req_id: str, **asked: Any) -> None:
    worker.admit(req_id, **{"diffusion_accept_probability": 0.9, **asked})


def rows(family: str, canvas: list[int]) -> torch.Tensor:
    """Of a canvas that begins a block. Of a shifted model each row speaks of the token behind."""
    return sure([*canvas[1:], 99] if family == "shifted" else canvas)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompts_last_row_foretells_the_first_token(worker: GetWorker, family: str) -> None:
    """The others are known before, and neighbours have none."""
    one = made(worker, family)
    admit(one, "old", prompt=C, seed=1)
    admit(one, "a", prompt=2 * C, computed=0)
    admit(one, "goes on", prompt=3 * C, computed=0)
    canvas = one.canvas("old")
    prompt = torch.cat([noise(2 * C - 1), sure([21])])
    found = one.step({"old": noise(C), "a": prompt, "goes on": noise(2 * C)})
    assert found.emitted["a"] == [] and found.rejected["a"] == 0
    assert one.canvas("a") == [21, MASK, MASK, MASK]
    assert one.slots.revealed[one.slot("a")].tolist() == [True, False, False, False]
    assert one.canvas("goes on") == [MASK] * C, "its prompt has not ended"
    assert one.canvas("old") != canvas, "which had its step meanwhile"
    found = one.step({"a": rows(family, [9, 22, 23, 24])})
    assert found.emitted == {"a": BLOCK}, "the first one stays"


@pytest.mark.parametrize(("prompt", "is_known"), [(C + 1, {"causal"}), (2 * C, {*FAMILIES})])
@pytest.mark.parametrize("family", FAMILIES)
def test_where_a_canvas_begins_amid_a_block(
    worker: GetWorker, family: str, prompt: int, is_known: set[str]
) -> None:
    """Of a shifted model its first rows are the prompt's, which each step reads again."""
    one = made(worker, family)
    admit(one, "a", prompt=prompt, computed=0)
    one.step({"a": torch.cat([noise(prompt - 1), sure([21])])})
    assert (one.canvas("a")[0] == 21) == (family in is_known)
    if family == "shifted" and prompt == C + 1:
        assert one.requests["a"].computed == C
        found = one.step({"a": sure([41, 42, 43, 99])})
        assert found.emitted == {"a": [41, 42, 43]}, "by the rows before them"


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_finished_block_foretells_the_next(worker: GetWorker, family: str, joins: bool) -> None:
    """When it is prefilled, whether that is a commit of its own or not. What a step says before
    the block is finished counts for nothing."""
    one = made(worker, family, joins_commits=joins)
    admit(one, "a", prompt=C, computed=0)
    one.step({"a": torch.cat([noise(C - 1), sure([21])])})
    found = one.step({"a": rows(family, BLOCK)})
    assert found.emitted["a"] == (BLOCK if joins else [])
    if joins:
        assert one.canvas("a") == [MASK] * C
    else:
        assert one.canvas("a") == BLOCK, "which its commit reads"
    found = one.step({"a": torch.cat([noise(C - 1), sure([31])])})
    assert one.answer("a") == BLOCK and found.rejected == {"a": 0}
    assert one.canvas("a") == [31, MASK, MASK, MASK]
    one.step({"a": rows(family, NEXT)})
    if not joins:
        one.step({"a": noise(C)})
    assert one.answer("a") == BLOCK + NEXT


@pytest.mark.numerics
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_first_token(worker: GetWorker, family: str) -> None:
    """Of a shifted model they are those by which it was chosen; a causal one's rows say their
    own."""
    one = made(worker, family)
    admit(one, "a", prompt=C, computed=0, logprobs=0, temperature=0.0)
    doubtful = sure([21], nats=6.0)
    one.step({"a": torch.cat([noise(C - 1), doubtful])})
    found = one.step({"a": rows(family, BLOCK)}).logprobs
    assert found is not None and found.logprob_token_ids[:, 0].tolist() == BLOCK
    chosen_by = doubtful[0] if family == "shifted" else sure(BLOCK)[0]
    allowed = 2 * tolerances.softmax(V, largest_logit=30.0)
    tolerances.assert_within(found.logprobs[0, 0], chosen_by.log_softmax(dim=-1)[21], allowed)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_token_is_drawn(worker: GetWorker, family: str) -> None:
    """By the seed, of a causal model; a shifted one's is always the most probable."""
    firsts = set()
    for seed in range(8):
        one = made(worker, family)
        admit(one, "a", prompt=C, computed=0, seed=seed, temperature=1.0)
        doubtful = sure([21], nats=7.0)
        doubtful[0, 22] = 7.1
        one.step({"a": torch.cat([noise(C - 1), doubtful])})
        firsts.add(one.canvas("a")[0])
    assert firsts == {22} if family == "shifted" else len(firsts) > 1
