"""An answer is closed within its tokens, and what that takes is known beforehand."""

import json
import re
from typing import Any

import numpy as np
import pytest
from llguidance import grammar_from

from checkpoints.recipes.exact_match import read_rows
from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import (
    EOS,
    SCHEMAS,
    noise,
    of_schema,
    rows_of,
    start,
    text_of,
    tokenizer,
)
from vllm_dllm.grammar import completion
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.completion import (
    complete_by_exploring,
    find_completion,
    find_shortest_completion,
    search_shortest_first,
)

# Fewest tokens by hand, in the shipped vocabulary, which has `{"`, `": "`, `", "` and others.
SHORTEST = {
    "person": 8,  # {" name ": " ", " age ": 0 }
    "any object": 2,
    "anything": 1,
    "list of integers": 2,
    "pair": 5,
    "nothing required": 2,
}


@pytest.mark.parametrize("name", SHORTEST)
def test_the_shortest_answer_is_found(name: str) -> None:
    tokens = find_shortest_completion(of_schema(SCHEMAS[name]), 100)
    assert tokens is not None and len(tokens) == SHORTEST[name], text_of(tokens or [])


def test_what_a_model_writes_fits_its_own_tokens() -> None:
    """With spaces, for which the tokenizer has tokens as `": "`, JSON may take fewer than without;
    the fewest were once sought without."""
    for row in read_rows(CHECKPOINTS / "held_out.jsonl"):
        if row["task"] != "write_json":
            continue
        values = json.loads(row["answer"])
        kinds = {key: "integer" if isinstance(values[key], int) else "string" for key in values}
        schema = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in kinds.items()},
            "required": list(values),
            "additionalProperties": False,
        }
        tokens = tokenizer().tokenize_str(row["answer"])
        assert find_completion(of_schema(schema), len(tokens)) is not None


def test_spaces_that_are_part_of_a_value_stay_away() -> None:
    """`","` is spelt `", "` only where that is another way of writing the same."""
    tokens = find_completion(of_schema({"const": 'a","b'}), 20)
    assert tokens is not None and json.loads(text_of(tokens)) == 'a","b'


def test_a_completion_depends_on_the_state_alone() -> None:
    """What one block was told can be closed must be closed by the next one, which asks anew."""
    state = of_schema(SCHEMAS["order"])
    tokens = tokenizer().tokenize_str('{"id": 7, "lines": [{"item": "bel')
    assert state.consume_tokens(tokens) == len(tokens)
    again = of_schema(SCHEMAS["order"])
    for token in tokens:
        again.consume_token(token)
    assert find_completion(state, 40) == find_completion(again, 40)


def test_a_long_form_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that cut an array which had to be long once searched its end several times anew,
    for seconds in which nobody's step went on."""
    state = of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 24})
    needed, searches = find_completion(state, 200), 0
    assert needed is not None

    def counted(*args: Any) -> list[int] | None:
        nonlocal searches
        searches += 1
        return complete_by_exploring(*args)

    monkeypatch.setattr(completion, "complete_by_exploring", counted)
    rng, left, num_cut = np.random.default_rng(0), len(needed) + 20, 0
    while left > 0 and not state.has_ended:
        for _ in range(3):  # steps of a block of 16
            found = constrain_canvas(state, rows_of(noise(rng, 16, 3.0)), left, EOS)
            num_cut += found.is_cut
        for token in found.path.tokens:
            assert state.consume_token(token)
        left -= len(found.path.tokens)
    assert (state.has_ended or state.is_complete()) and num_cut > 8 and searches <= 2


@pytest.mark.parametrize("spare", [0, 40], ids=["cut", "let through"])
def test_the_next_block_falls_back_on_the_plan(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Where a search gives up, an answer was once left open that the block before could close."""
    state = of_schema(SCHEMAS["order"])
    needed = find_completion(state, 200)
    assert needed is not None
    most = len(needed) + spare
    rows = rows_of(noise(np.random.default_rng(1), 8, 3.0))
    path = constrain_canvas(state, rows, most, EOS).path.tokens
    assert len(path) == 8 and all(state.consume_token(token) for token in path)
    for search in ("complete_greedily", "complete_by_exploring", "search_shortest_first"):
        monkeypatch.setattr(completion, search, lambda *args: None)
    tokens = find_completion(state, most - 8)
    assert tokens is not None
    end = state.copy()
    assert end.consume_tokens(tokens) == len(tokens) and end.is_complete()
    for i, token in enumerate(tokens):  # to where there is a choice
        assert state.plan == tokens[i:]
        others = [t for t in range(7, 490) if t != token and state.allows_token(t)]
        if i and others:
            break
        assert state.consume_token(token)
    assert state.consume_token(others[0]) and state.plan is None


def test_the_search_ends() -> None:
    state = start(grammar_from("regex", "(a|bc){50}b"))
    tokens = find_completion(state, 60)
    assert tokens is not None and text_of(tokens) == "a" * 50 + "b"
    assert search_shortest_first(state, 20) is None


@pytest.mark.parametrize(
    ("regex", "answer"),
    [("([a-z]+ ){8}end", "([a-z]+ ){8}end"), ("[A-Z]+z", "[A-Z]z"), ("[a-y ]*\\nz", "\nz")],
)
def test_what_ends_is_found_among_what_goes_on(regex: str, answer: str) -> None:
    tokens = find_completion(start(grammar_from("regex", regex)), 60)
    assert tokens is not None and re.fullmatch(answer, text_of(tokens))


def test_a_path_is_cut_as_late_as_possible() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    rows = rows_of(noise(np.random.default_rng(0), 16, 3.0))
    free = constrain_canvas(of_schema(schema), rows, 1000, EOS).path.tokens
    cut = constrain_canvas(of_schema(schema), rows, 16, EOS)
    kept = sum(1 for a, b in zip(free, cut.path.tokens, strict=False) if a == b)
    assert len(cut.path.tokens) <= 16 and kept >= len(cut.path.tokens) - 4


def test_an_answer_that_cannot_fit_stays_open() -> None:
    state = of_schema(SCHEMAS["person"])
    found = constrain_canvas(state, rows_of(noise(np.random.default_rng(0), 4, 3.0)), 4, EOS)
    assert len(found.path.tokens) == 4 and not found.ended
