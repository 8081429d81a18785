"""Requests with grammars beside others: legal in every step, whatever else happens to them."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.processes import HANGS_S
from tests.unit.grammar.canvases import text_of, tokenizer
from tests.unit.step.worker import EOS, C, GetWorker, Worker, noise, sure
from vllm_dllm.denoise.impossible import ILLEGAL_LOGIT
from vllm_dllm.denoise.rules import Reveal
from vllm_dllm.grammar.walk import StuckError
from vllm_dllm.step.asked import grammars
from vllm_dllm.step.asked.grammars import HELD_STEPS, CanvasGrammars
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.masked.masked_step import MaskedStep

BLOCK = [21, 22, 23, 24]
LETTERS = tokenizer().tokenize_str("q") * C
MASKED = {"step_cls": MaskedStep, "architecture": "SDARForCausalLM"}


@pytest.fixture
def patient(worker: GetWorker) -> GetWorker:
    """Workers that wait for grammars, as those that share a model do."""

    def make(**options: Any) -> Worker:
        return worker(**options, num_workers=2)

    return make


def of(regex: str, **asked: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(regex=regex), "eos": EOS, **asked}


def known(worker: Worker, req_id: str) -> int:
    """Rows of emitted tokens that come before its canvas."""
    if not worker.joins_commits:
        return 0
    request = worker.requests[req_id]
    return len(request.tokens) - request.computed


def step(worker: Worker, req_id: str, says: torch.Tensor) -> list[int]:
    return worker.step({req_id: torch.cat([noise(known(worker, req_id)), says])}).emitted[req_id]


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("kind", [{}, MASKED], ids=["uniform", "masked"])
def test_an_answer_is_legal_and_closed_in_time(
    patient: GetWorker, kind: dict[str, Any], joins: bool
) -> None:
    """Of a model that wants letters for ever, and says so from when the answer is cut."""
    one = patient(**kind, joins_commits=joins)
    one.admit("a", **of("[a-z]+[0-9]{3}!", max_tokens=11))
    one.admit("b", seed=1, max_tokens=2 * C)
    cut = []
    while len(one.answer("a")) < 11:
        request = one.requests["a"]
        begins = len(request.tokens) - request.prompt_len
        one.step(
            {
                "a": torch.cat([noise(known(one, "a")), sure(LETTERS)]),
                "b": torch.cat([noise(known(one, "b")), sure(BLOCK)]),
            }
        )
        numbers = one.sampler.take_numbers()
        cut.append((begins, numbers is not None and numbers.cut == [0]))
    assert re.fullmatch("q{7}[0-9]{3}!", text_of(one.answer("a")[:11]))
    assert one.answer("b")[: 2 * C] == BLOCK * 2
    cut_in = {begins for begins, is_cut in cut if is_cut}
    assert cut_in == ({C, 2 * C} if kind else {C})


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("kind", [{}, MASKED], ids=["uniform", "masked"])
def test_after_a_preemption(patient: GetWorker, kind: dict[str, Any], joins: bool) -> None:
    """At any step, and in another's slot: the same answer, and as much of it cut."""
    found = []
    for preempted_in in (None, 1, 2, 3, 5, 7):
        one = patient(**kind, joins_commits=joins)
        one.admit("a", **of("[a-z]+[0-9]{5}!", max_tokens=16, temperature=0.0))
        num_steps, cut = 0, {}
        while len(one.answer("a")) < 16:
            if (num_steps := num_steps + 1) == preempted_in:
                one.leave("a")
                one.admit("other", seed=1)
                request = one.requests["a"]
                # Of a masked model, a block that is committed beside its successor is prefilled.
                request.computed = len(request.tokens)
                one.place("a")
            begins = len(one.answer("a"))
            step(one, "a", sure(LETTERS, nats=6.0))
            numbers = one.sampler.take_numbers()
            cut[begins] = numbers is not None and numbers.cut == [0]
        found.append((one.answer("a"), cut))
    assert found[1:] == found[:1] * 5
    assert any(found[0][1].values())


def test_an_answer_that_is_cut_stays_so(patient: GetWorker) -> None:
    """What closes it takes a block more, in which nothing is cut. That block is not the worker's
    that saw it: the request was preempted meanwhile."""
    one = patient(**MASKED).admit("a", **of("[a-z]+-2026-11-26!", max_tokens=16, temperature=0.0))
    while len(one.answer("a")) < 3 * C:
        step(one, "a", sure(LETTERS))
    one.leave("a")
    one.requests["a"].computed = len(one.requests["a"].tokens)
    one.place("a")
    step(one, "a", sure(LETTERS))
    numbers = one.sampler.take_numbers()
    assert numbers is not None and numbers.cut == [0]


def test_what_is_forced_begins_a_canvas(patient: GetWorker) -> None:
    one = patient()
    tokens = tokenizer().tokenize_str("forced from end to end")
    assert len(tokens) > 2 * C
    one.admit("a", **of("forced from end to end"))
    assert one.canvas("a") == tokens[:C]
    one.admit("free", seed=1)
    assert one.canvas("free") != tokens[:C]
    while not step(one, "a", noise(C)):
        pass
    assert one.answer("a") == tokens[:C] and one.canvas("a") == tokens[C : 2 * C]


def test_nobody_waits_for_a_slow_grammar(
    worker: GetWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, may_go_on = CanvasGrammars._compile, threading.Event()

    def slowly(self: CanvasGrammars, *args: Any) -> Any:
        assert may_go_on.wait(HANGS_S)
        return compile_(self, *args)

    monkeypatch.setattr(CanvasGrammars, "_compile", slowly)
    one = worker()
    one.admit("free", seed=1)
    one.admit("a", **of("x[0-9]+"))
    first = one.canvas("a")
    for _ in range(2):
        found = one.step({"free": sure(BLOCK), "a": sure(LETTERS)})
        assert found.emitted["a"] == [] and found.rejected["a"] == C
        assert one.canvas("a") == first and not one.slots.read_numbers([one.slot("a")]).steps_done
    assert found.emitted["free"] == BLOCK
    may_go_on.set()
    one.asked.grammars._answers[one.slot("a")].grammar.result()
    step(one, "a", sure(LETTERS))  # which finds it compiled when it is over
    assert one.canvas("a")[0] == tokenizer().tokenize_str("x")[0]
    step(one, "a", sure(LETTERS))
    assert one.slots.read_numbers([one.slot("a")]).steps_done == 1


def test_a_request_that_leaves_before_its_grammar_is_there(
    worker: GetWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(CanvasGrammars, "_compile", lambda *args: may_go_on.wait(HANGS_S))
    one = worker().admit("a", **of("x[0-9]+"))
    one.leave("a")
    one.admit("b")
    for _ in range(2):
        found = one.step({"b": sure(BLOCK)})
    may_go_on.set()
    assert found.emitted == {"b": BLOCK}


def broken(*args: Any) -> Any:
    raise ValueError("a broken form")


def stuck(*args: Any) -> Any:
    raise StuckError("no token is legal\nERROR forged")


@pytest.mark.parametrize("kind", [{}, MASKED], ids=["uniform", "masked"])
@pytest.mark.parametrize("fault", ["no grammar", "no path", "an illegal token"])
def test_a_request_goes_on_without_its_grammar(
    patient: GetWorker,
    monkeypatch: pytest.MonkeyPatch,
    logged: Callable[..., list[str]],
    fault: str,
    kind: dict[str, Any],
) -> None:
    """The scheduler, which has one of its own, ends it. Nobody else is disturbed, and the log says
    why."""
    lines = logged(grammars, "error")
    if fault == "no grammar":
        monkeypatch.setattr(CanvasGrammars, "_compile", broken)
    if fault == "no path":
        monkeypatch.setattr("vllm_dllm.step.asked.grammars.constrain_canvas", stuck)
        monkeypatch.setattr("vllm_dllm.step.asked.grammar_runs.reveal_run", stuck)
    one = patient(**kind)
    one.admit("a", **of("[0-9]+", temperature=0.0))
    one.admit("b", **of("[a-z]+") if fault == "an illegal token" else {"seed": 1})
    if fault == "an illegal token":
        one.requests["a"].tokens += BLOCK
        one.leave("a")
        one.place("a")
        one.requests["a"].computed += C
    says = {"a": sure(BLOCK), "b": sure(LETTERS)}
    for _ in range(2 - bool(kind)):  # a masked model without a doubt takes one
        found = one.step(says)
    assert found.emitted == {"a": BLOCK, "b": LETTERS}
    (line,) = lines
    assert line.startswith("Request 'a' goes on without its grammar: ") and "\n" not in line


def test_a_read_only_request_has_a_path_through_its_canvas(patient: GetWorker) -> None:
    one = patient()
    one.admit("a", **of("[0-9]+", max_tokens=C, diffusion_read_only=True, diffusion_max_steps=1))
    emitted = step(one, "a", sure(LETTERS))
    assert re.fullmatch("[0-9]+", text_of(emitted[: [*emitted, EOS].index(EOS)]))


@pytest.mark.parametrize("kind", [{}, MASKED], ids=["uniform", "masked"])
def test_rows_behind_the_last_token_are_free(
    patient: GetWorker, logged: Callable[..., list[str]], kind: dict[str, Any]
) -> None:
    """A step of the next canvas may be under way when the answer ends."""
    lines = logged(grammars, "error")
    one = patient(**kind)
    one.admit("a", **of("[0-9]{2}", max_tokens=2))
    emitted = []
    while not emitted:
        emitted = step(one, "a", sure(LETTERS))
    assert re.fullmatch("[0-9]{2}", text_of(emitted[:2])) and emitted[2:] == LETTERS[2:]
    step(one, "a", sure(LETTERS))
    assert not lines


@pytest.mark.parametrize("reveals", [False, True])
@pytest.mark.parametrize("steps_done", [0, HELD_STEPS - 1, HELD_STEPS])
def test_how_long_a_canvas_is_held(patient: GetWorker, steps_done: int, reveals: bool) -> None:
    """To legal tokens alone; one that shows what stays is, to the end."""
    one = patient()
    one.admit("a", **of("[0-9]+"))
    one.admit("free", seed=1)
    one.stepping.begin_step(one._batch({"free": C, "a": C}, late=0))
    batch = one.stepping.batch
    assert batch is not None
    source, numbers = noise(2 * C), torch.tensor([0, steps_done])
    starts, none = torch.tensor([C, C]), torch.zeros(2, dtype=torch.bool)
    context = RuleContext(batch, starts, torch.full((2, C), -1))
    logits = one.stepping._wrap_logits(source, context)
    reveal = None
    if reveals:
        chosen, shown = torch.tensor([False, True]), torch.zeros(2, C, dtype=torch.bool)
        reveal = Reveal(chosen, torch.ones(2), torch.ones(2), shown, shown.long())
    warm = torch.ones(2 * C, 1)
    found = one.asked.grammars.find_legal_paths(batch, starts, none, numbers, logits, warm, reveal)
    (rows,) = logits.processed(1)
    is_held = steps_done < HELD_STEPS or reveals
    assert (rows == ILLEGAL_LOGIT).any(dim=-1).all() == is_held
    assert torch.equal(torch.cat(list(logits.processed(0))), source[:C])
    assert found.constrained.is_chosen.tolist() == [False, True]
    skipped = one.asked.grammars.find_legal_paths(batch, starts, ~none, numbers, logits, warm, None)
    assert not skipped.constrained.is_chosen.any() and (skipped.guess == -1).all()
