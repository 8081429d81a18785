"""An answer with a grammar goes on after a preemption as if its request had stayed."""

from concurrent.futures import Future

import numpy as np
import pytest
from llguidance import grammar_from

from tests.unit.grammar.canvases import EOS, SCHEMAS, noise, of_schema, rows_of, start, tokenizer
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.step.asked import answer
from vllm_dllm.step.asked.answer import Answer, KeptMarks, Mark

PROMPT, BLOCK, REVEALED, END = 5, 8, 3, 205
SECOND, THIRD = PROMPT + BLOCK, PROMPT + 2 * BLOCK


def answer_of(state: GrammarState, kept: tuple[Mark, Mark] | None = None) -> Answer:
    compiled: Future[GrammarState] = Future()
    compiled.set_result(state)
    return Answer(compiled, PROMPT, END, wanted_stop=EOS, goes_on=False, kept=kept)


def order(kept: tuple[Mark, Mark] | None = None) -> Answer:
    return answer_of(of_schema(SCHEMAS["order"]), kept)


def digit() -> GrammarState:
    return start(grammar_from("regex", "[0-9]"))


def in_second_block() -> tuple[Answer, list[int]]:
    """Which a step has cut, with a plan of its own. And the answer as that plan has it."""
    begun = order()
    begun.begin_canvas(PROMPT, [])
    first = find_completion(begun.state, 200)
    assert first is not None
    begun.state.plan = first
    begun.begin_canvas(SECOND, first[:BLOCK])
    rows = rows_of(noise(np.random.default_rng(1), BLOCK, 3.0))
    constrain_canvas(begun.state, rows, END - SECOND, EOS)
    assert begun.state.plan not in (None, first[BLOCK:])
    begun.is_cut = True
    return begun, first[:BLOCK] + begun.state.plan


@pytest.mark.parametrize("num_revealed", [0, REVEALED, BLOCK], ids="{} revealed".format)
@pytest.mark.parametrize("is_committed", [False, True], ids=["starts anew", "committed meanwhile"])
def test_after_a_preemption(is_committed: bool, num_revealed: int) -> None:
    """Tokens that a step has revealed for good are consumed before they are emitted."""
    stayed, tokens = in_second_block()
    kept = KeptMarks()
    at_the_beginning = stayed.canvas
    assert at_the_beginning is not None and not at_the_beginning.is_cut
    stayed._consume(tokens[BLOCK : BLOCK + num_revealed])
    kept.save("a", stayed)
    back = order(kept.pop("a"))
    if is_committed:
        assert back.begin_canvas(THIRD, tokens[: 2 * BLOCK]) is None
        stayed.begin_canvas(THIRD, tokens[BLOCK + num_revealed : 2 * BLOCK])
        assert (back.current_mark, back.canvas) == (stayed.current_mark, stayed.canvas)
        assert back.is_cut and back.state.plan == tokens[2 * BLOCK :]
        assert np.array_equal(back.state.compute_mask(), stayed.state.compute_mask())
    else:
        assert back.begin_canvas(SECOND, tokens[:BLOCK]) is None
        assert back.current_mark == back.canvas == at_the_beginning
    assert back.kept is None, "once"


def test_preempted_again_before_anything_happened() -> None:
    """Its grammar need not be there yet."""
    begun, _ = in_second_block()
    kept = KeptMarks()
    kept.save("a", begun)
    marks = kept.pop("a")
    waiting = Answer(Future(), PROMPT, END, wanted_stop=EOS, goes_on=False, kept=marks)
    for back in (order(marks), waiting):
        kept.save("a", back)
        assert kept.pop("a") == marks is not None


def test_nothing_is_kept_of_what_has_not_begun_or_is_over() -> None:
    kept, failed = KeptMarks(), Future()
    failed.set_exception(ValueError("a bad form"))
    ended = answer_of(digit())
    ended.begin_canvas(PROMPT, tokenizer().tokenize_str("7"))
    ended.begin_canvas(PROMPT + 2, [EOS])
    assert ended.state.has_ended
    broken = Answer(failed, PROMPT, END, wanted_stop=EOS, goes_on=False)
    waiting = Answer(Future(), PROMPT, END, wanted_stop=EOS, goes_on=False)
    begun = in_second_block()[0]
    broken.canvas = waiting.canvas = begun.canvas
    for one in (order(), ended, broken, waiting):
        kept.save("a", one)
        assert kept.pop("a") is None


def test_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MOST_KEPT", 2)
    kept, begun = KeptMarks(), in_second_block()[0]
    for name in "abc":
        kept.save(name, begun)
    assert [kept.pop(name) is None for name in "abc"] == [True, False, False]
    assert kept.pop("c") is None, "each once"


@pytest.mark.parametrize("at", [2, BLOCK + 1], ids=["known before", "since"])
def test_an_illegal_token_is_named(at: int) -> None:
    begun, tokens = in_second_block()
    kept = KeptMarks()
    kept.save("a", begun)
    back, tokens = order(kept.pop("a")), tokens[: 2 * BLOCK]
    tokens[at] = EOS
    assert back.begin_canvas(THIRD, tokens) == EOS


@pytest.mark.parametrize(
    ("wanted", "stops", "stop"),
    [(7, {7, EOS}, 7), (None, {EOS, 3}, EOS), (9, {EOS, 3}, EOS), (9, {5, 3}, 3)],
    ids=["as wanted", "the tokenizer's", "the wanted one is excluded", "both are"],
)
def test_what_ends_a_cut_answer(wanted: int | None, stops: set[int], stop: int) -> None:
    compiled: Future[GrammarState] = Future()
    compiled.set_result(digit())
    compiled.result().stops = frozenset(stops)
    assert Answer(compiled, PROMPT, END, wanted, goes_on=False).stop_token == stop
