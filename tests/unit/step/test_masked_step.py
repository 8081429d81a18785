"""Steps of masked models: what is revealed stays, blocks are counted from the prompt's first token,
and parts of canvases are taken back."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.unit.step.worker import CONTEXT, MASK, C, Worker, noise, sure
from vllm_dllm.step.masked.masked_step import MaskedStep

GetWorker = Callable[..., Worker]
BLOCK, OTHER = [21, 22, 23, 24], [31, 32, 33, 34]


@pytest.fixture
def masked(worker: GetWorker) -> GetWorker:
    def make(architecture: str = "SDARForCausalLM", **options: Any) -> Worker:
        return worker(MaskedStep, architecture, **options)

    return make


def says(worker: Worker, req_id: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Of its known rows nothing, and of its canvas these tokens."""
    request = worker.requests[req_id]
    known = len(request.tokens) - request.computed
    return {req_id: torch.cat([noise(known), sure(tokens)])}


@pytest.mark.parametrize(("num_steps", "shares"), [(4, [1, 1, 1, 1]), (3, [2, 1, 1]), (1, [4])])
def test_what_is_revealed_stays(masked: GetWorker, num_steps: int, shares: list[int]) -> None:
    """From the left, where asked so; whatever the model says of it afterwards."""
    one = masked()
    order = {"diffusion_acceptance": "in_order", "diffusion_max_steps": num_steps}
    one.admit("a", temperature=0.0, **order)
    shown = 0
    for step, share in enumerate(shares):
        assert one.canvas("a") == BLOCK[:shown] + [MASK] * (C - shown)
        found = one.step(says(one, "a", OTHER[:shown] + BLOCK[shown:]))
        shown += share
        assert found.emitted == {"a": BLOCK if step == len(shares) - 1 else []}
    assert one.canvas("a") == [MASK] * C, "the next one"
    assert not one.slots.revealed[one.slot("a")].any()
    assert int(one.slots.read_numbers([one.slot("a")]).steps_done) == 0


def test_a_part_of_a_canvas_is_taken_back(masked: GetWorker) -> None:
    """Unless it ends where its block or the context does."""
    for joins in (True, False):
        one = masked(joins_commits=joins)
        one.admit("a", prompt=C + 1)
        one.admit("b", prompt=C)
        one.admit("short", prompt=CONTEXT - 2)
        for name in ("a", "b", "short"):
            one.requests[name].computed = one.requests[name].prompt_len // C * C
        before = one.canvas("a")
        rows = {"a": 3, "b": C, "short": 4}
        found = one.step({name: sure([7] * number) for name, number in rows.items()})
        assert one.canvas("a") == before == [MASK] * C, joins
        assert found.emitted["a"] == []
        assert found.emitted["b"] == ([7] * C if joins else [])
        found = one.step({"a": sure([7] * C)})
        if not joins:
            found = one.step({"a": sure([7] * C)})
        assert found.emitted == {"a": [7] * 3}, "what the prompt leaves of its block"


def test_a_canvas_that_the_context_cuts_is_whole(masked: GetWorker) -> None:
    one = masked(context=C + 2)
    one.admit("a", prompt=C)
    assert one.step({"a": sure(BLOCK[:2])}).emitted == {"a": BLOCK[:2]}


@pytest.mark.parametrize("in_parts", [True, False])
def test_parts_are_revealed_one_after_the_other(masked: GetWorker, in_parts: bool) -> None:
    """Of eight tokens, counted from where the block begins, not the canvas."""
    family = "Fast_dLLM_QwenForCausalLM" if in_parts else "SDARForCausalLM"
    one = masked(family, canvas_length=16)
    one.admit("a", prompt=3, diffusion_accept_probability=0.9)
    one.requests["a"].computed = 0
    says_all = torch.cat([noise(3), sure(range(20, 33))])
    one.step({"a": says_all})
    shown = [token != MASK for token in one.canvas("a")[:13]]
    if in_parts:
        assert shown == [True] * 5 + [False] * 8
        assert one.step({"a": says_all}).emitted == {"a": list(range(20, 33))}
    else:
        assert one.answer("a") == list(range(20, 33)), "at once"


def test_edits(masked: GetWorker) -> None:
    """A block is over when a step has changed nothing, which leaves keys and values as a commit
    would."""
    one = masked()
    one.admit("a", temperature=0.0, diffusion_edit_probability=0.5)
    for tokens in (BLOCK, OTHER):
        assert one.step(says(one, "a", tokens)).emitted == {"a": []}
        assert one.canvas("a") == tokens
    found = one.step(says(one, "a", OTHER))
    assert found.emitted == {"a": OTHER} and found.rejected == {"a": 0}
    assert one.requests["a"].computed == 2 * C
    # The steps of the block before do not count.
    for tokens in (BLOCK, OTHER, BLOCK):
        assert one.step(says(one, "a", tokens)).emitted == {"a": []}


def test_edits_end(masked: GetWorker) -> None:
    """With a block that is read again: its last step has changed it."""
    one = masked()
    one.admit("a", temperature=0.0, diffusion_edit_probability=0.5, diffusion_edit_steps=2)
    for tokens in (BLOCK, OTHER):
        assert one.step(says(one, "a", tokens)).emitted == {"a": []}
    found = one.step(says(one, "a", BLOCK))
    assert found.emitted == {"a": BLOCK} and found.rejected == {"a": C}


def test_draws_are_its_own(masked: GetWorker) -> None:
    alone, beside = masked(), masked()
    for one in (alone, beside):
        one.admit("a", seed=5, temperature=1.0)
    beside.admit("b", seed=6, temperature=1.0)
    for step in range(6):
        rows = noise(C, seed=step, scale=1.0)
        alone.step({"a": rows})
        beside.step({"b": noise(C, seed=50, scale=1.0), "a": rows})
        assert alone.canvas("a") == beside.canvas("a")
        if alone.answer("a"):
            break
    assert alone.answer("a") == beside.answer("a") != beside.answer("b")[:C]


def unsure(tokens: list[int], seed: int) -> torch.Tensor:
    """[L, V] fp32: logits of a model that finds `tokens` likely, and others by the seed."""
    return noise(len(tokens), seed, scale=1.0) + sure(tokens, nats=10.0)


def assert_placed(
    found: Any,  # `LogprobsTensors`
    tokens: list[int],
    steps: list[int],
    logits: Mapping[int, torch.Tensor],  # [C, V] fp32 by step
) -> None:
    """Each token's score is that of its step."""
    assert (found.selected_token_ranks >> 32).tolist() == [step + 1 for step in steps]
    assert (found.selected_token_ranks % 2**32 == 1).all()
    assert found.logprob_token_ids[:, 0].tolist() == tokens
    for row, (token, step) in enumerate(zip(tokens, steps, strict=True)):
        expected = logits[step].log_softmax(-1)[row, token]
        tolerances.assert_within(found.logprobs[row, 0], expected, tolerances.softmax(512, 30.0))


@pytest.mark.parametrize("joins", [True, False])
def test_log_probabilities_of_the_step_that_revealed(masked: GetWorker, joins: bool) -> None:
    """Not of one that was taken back, nor of a block's own commit."""
    one = masked(joins_commits=joins)
    asked = {"diffusion_acceptance": "in_order", "diffusion_logprobs": "unmask"}
    one.admit("a", temperature=0.0, logprobs=1, **asked)
    logits = {step: unsure(BLOCK, step) for step in range(1, C + 1)}
    for step, rows in logits.items():
        if not joins:
            one.step({"a": noise(C - 1)})
        found = one.step({"a": rows})
        assert found.emitted == {"a": BLOCK if joins and step == C else []}
    if not joins:
        found = one.step({"a": noise(C)})
    assert found.emitted == {"a": BLOCK}
    assert_placed(found.logprobs, BLOCK, [1, 2, 3, 4], logits)


def test_log_probabilities_of_an_edit(masked: GetWorker) -> None:
    """A token that has replaced another one has those of that step."""
    one = masked("LLaDA2MoeModelLM")
    asked = {"diffusion_accept_probability": 0.5, "diffusion_edit_probability": 0.5}
    one.admit("a", temperature=0.0, logprobs=0, diffusion_logprobs="unmask", **asked)
    edited = [BLOCK[0], OTHER[1], *BLOCK[2:]]
    says = (BLOCK, edited, edited)
    logits = {step: unsure(tokens, step) for step, tokens in enumerate(says, start=1)}
    for rows in logits.values():
        found = one.step({"a": rows})
    assert found.emitted == {"a": edited}
    assert_placed(found.logprobs, edited, [1, 2, 1, 1], logits)
