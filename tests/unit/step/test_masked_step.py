"""Blocks of masked models: what their requests' settings say, what a step reveals, and first tokens
that the row before foretells."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests import tolerances
from tests.unit.step.worker import CONTEXT, MASK, C, V, Worker, noise, sure
from vllm_dllm.denoise.masked import Candidates, reveal_candidates
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings
from vllm_dllm.step.masked.drafting_step import ShiftedStep
from vllm_dllm.step.masked.first_token_step import VerifiedStep
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


@pytest.mark.parametrize("in_parts", [True, False])
def test_parts_are_revealed_one_after_the_other(masked: GetWorker, in_parts: bool) -> None:
    """Of eight tokens, counted from where the block begins, not the canvas."""
    family = "Fast_dLLM_QwenForCausalLM" if in_parts else "SDARForCausalLM"
    one = masked(family, canvas_length=16).admit("a", prompt=3, diffusion_accept_probability=0.9)
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
    one = masked().admit("a", temperature=0.0, diffusion_edit_probability=0.5)
    for tokens in (BLOCK, OTHER):
        assert one.step(says(one, "a", tokens)).emitted == {"a": []}
        assert one.canvas("a") == tokens
    found = one.step(says(one, "a", OTHER))
    assert found.emitted == {"a": OTHER} and found.rejected == {"a": 0}
    assert one.requests["a"].computed == 2 * C
    # The steps of the block before do not count.
    for tokens in (BLOCK, OTHER, BLOCK):
        assert one.step(says(one, "a", tokens)).emitted == {"a": []}


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


FAMILIES: dict[str, tuple[type[MaskedStep], str]] = {
    "causal": (VerifiedStep, "NemotronLabsDiffusionModel"),
    "shifted": (ShiftedStep, "Fast_dLLM_QwenForCausalLM"),
}


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
    one.step({"a": rows(family, OTHER)})
    if not joins:
        one.step({"a": noise(C)})
    assert one.answer("a") == BLOCK + OTHER


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
