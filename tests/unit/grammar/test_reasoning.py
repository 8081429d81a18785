"""Free text comes before the form of an answer, up to a token that ends it."""

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from

from tests.unit.grammar.canvases import (
    CALL,
    CHANNEL_BEGINS,
    CHANNEL_ENDS,
    EOS,
    SCHEMAS,
    THOUGHT_ENDS,
    V,
    answer,
    decode,
    encode,
    grammars,
    normalised,
    rows_of,
)
from vllm_dllm.grammar.canvas import (
    ConstrainedCanvas,
    RowCandidate,
    RunRule,
    constrain_canvas,
    reveal_run,
)
from vllm_dllm.grammar.completion import find_completion, find_shortest_completion
from vllm_dllm.grammar.masks import Exclusions, has_token, unpack_mask
from vllm_dllm.grammar.state import GrammarState, Reasoning

THINK = Reasoning(frozenset({THOUGHT_ENDS}))
GEMMA = Reasoning(frozenset({CHANNEL_ENDS, CALL}), frozenset({CALL}), frozenset({CHANNEL_BEGINS}))
PERSON = SCHEMAS["person"]
EMMA = '{"name": "Emma", "age": 71}'


def start(
    schema: dict = PERSON, reasoning: Reasoning = THINK, exclusions: Exclusions | None = None
) -> GrammarState:
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return grammars().start_state(text, frozenset(), exclusions, 0, reasoning)


def found_for(
    text: str, length: int, state: GrammarState | None = None, most: int = 200, sure: float = 12.0
) -> ConstrainedCanvas:
    """What becomes of a canvas of which the model means `text`, and then nothing more."""
    logits = np.random.default_rng(0).normal(size=(length, V))
    for row, token in enumerate([*encode(text), *[EOS] * length][:length]):
        logits[row, token] += sure
    return constrain_canvas(state or start(), rows_of(normalised(logits)), most, EOS)


def test_the_form_begins_amid_a_canvas() -> None:
    thought = "Emma is 71: {"
    found = found_for(f"{thought}</think>{EMMA}", 64)
    assert decode(found.path.tokens) == f"{thought}</think>{EMMA}" and found.ended
    # What is thought is nobody's business.
    assert found.path.num_reasoning == len(encode(thought)) + 1
    assert found.path.cost_nats == 0 and min(found.path.masks) >= found.path.num_reasoning


def test_a_run_ends_the_reasoning_where_the_model_would_stop() -> None:
    def choose(row: int, mask: np.ndarray | None) -> RowCandidate:
        token = EOS if mask is None else int(unpack_mask(mask, V).argmax())
        return RowCandidate(token, 1.0, 0.0)

    run = reveal_run(start(), choose, 0, 1, 200, RunRule(1, 0.5, 0.0), EOS)
    assert run == ([THOUGHT_ENDS], False)


def test_only_what_follows_is_repaired() -> None:
    found = found_for('}}"{ no</think>{"name": "Emma",, "age": "71"}', 64, sure=14.0)
    text = decode(found.path.tokens)
    assert text.startswith('}}"{ no</think>')
    jsonschema.validate(json.loads(text.partition("</think>")[2]), PERSON)


def test_what_begins_reasoning_comes_first() -> None:
    """Else a parser takes what came before it for the answer, which then has no form."""
    first = found_for("<|channel>on", 8, start(reasoning=GEMMA))
    assert decode(first.path.tokens).startswith("<|channel>on")
    found = found_for(f"on<|channel><channel|>{EMMA}", 64, start(reasoning=GEMMA))
    assert CHANNEL_BEGINS not in found.path.tokens
    assert decode(found.path.tokens).endswith(f"<channel|>{EMMA}") and found.ended
    state = start(reasoning=GEMMA)
    assert state.allows_token(CHANNEL_BEGINS) and has_token(state.compute_mask(), CHANNEL_BEGINS)
    assert state.consume_tokens(encode("on")) == len(encode("on"))
    for later in (state, state.copy()):
        assert not later.allows_token(CHANNEL_BEGINS) and not has_token(
            later.compute_mask(), CHANNEL_BEGINS
        )
        assert not later.consume_token(CHANNEL_BEGINS)


def test_reasoning_goes_over_blocks() -> None:
    state = start()
    for block in ("on and on ", "and on "):
        tokens = found_for(block, len(encode(block)), state).path.tokens
        assert decode(tokens) == block and all(state.consume_token(token) for token in tokens)
    last = found_for(f"</think>{EMMA}", 40, state, most=100)
    assert decode(last.path.tokens) == f"</think>{EMMA}"


def test_it_does_not_stop_the_answer() -> None:
    """Where the model would stop before it has answered, the answer begins."""
    text = decode(found_for("I know. ", 48).path.tokens)
    assert text.startswith("I know. </think>")
    jsonschema.validate(json.loads(text.partition("</think>")[2]), PERSON)


@pytest.mark.parametrize("spare", [0, 1, 30])
@pytest.mark.parametrize("name", ["person", "order", "list of integers"])
def test_an_answer_of_noise_fits(name: str, spare: int) -> None:
    """The reasoning is cut where the answer would not fit any more."""
    state = start(SCHEMAS[name])
    needed = find_shortest_completion(state, 200)
    assert needed is not None and needed[0] == THOUGHT_ENDS
    most = len(needed) + spare
    tokens = answer(state, np.random.default_rng(spare), 16, most, scale=3.0)
    assert len(tokens) <= most
    text = decode(tokens[tokens.index(THOUGHT_ENDS) + 1 :])
    jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_a_token_that_opens_the_answer_ends_it_too() -> None:
    calls = grammars().start_state(
        grammar_from("grammar", 'start: "a"? <|tool_call> "call" <tool_call|>'),
        frozenset(),
        None,
        0,
        GEMMA,
    )
    text = "so<|tool_call>call<tool_call|>"
    assert decode(found_for(text, 16, calls).path.tokens) == text
    # Of a form that does not begin with it, it is no part.
    state = start(reasoning=GEMMA)
    assert not state.allows_token(CALL) and not has_token(state.compute_mask(), CALL)
    assert state.consume_tokens([100, CALL, 101]) == 1
    assert state.allows_token(CHANNEL_ENDS) and state.reasoning_ends() == [CHANNEL_ENDS]


def test_what_is_excluded_is_not_thought() -> None:
    word = encode("on")[0]
    exclusions = Exclusions(512, None, frozenset({(word,)}))
    path = found_for("on on", 40, start(exclusions=exclusions)).path
    assert word not in path.tokens and THOUGHT_ENDS in path.tokens
    never_ends = Exclusions(512, None, frozenset({(THOUGHT_ENDS,)}))
    assert find_completion(start(exclusions=never_ends), 200) is None


def test_a_copy_thinks_on_its_own() -> None:
    state = start()
    other = state.copy()
    assert (
        other.consume_token(THOUGHT_ENDS) and other.reasoning is None and state.reasoning is THINK
    )
    assert other.consume_tokens(encode("{")) == 1 and state.consume_tokens(encode("}")) == 1


MAY_THINK = replace(GEMMA, is_open=False)


def test_an_answer_that_begins_at_once_has_its_form() -> None:
    """A parser takes it for content: it was once taken for reasoning, and another was made up."""
    assert decode(found_for(EMMA, 48, start(reasoning=MAY_THINK)).path.tokens) == EMMA
    # What is neither reasoning nor of the form does not begin.
    state = start(reasoning=MAY_THINK)
    assert not state.allows_token(encode("Well")[0]) and state.allows_token(CHANNEL_BEGINS)
    assert has_token(state.compute_mask(), CHANNEL_BEGINS) and has_token(
        state.compute_mask(), encode("{")[0]
    )
    assert find_completion(state, 8) is not None and find_completion(state, 7) is None


def test_an_answer_that_thinks_first() -> None:
    text = f"<|channel>thought\nHm.<channel|>{EMMA}"
    state = start(reasoning=MAY_THINK)
    assert decode(found_for(text, 64, state).path.tokens) == text
    assert state.consume_token(CHANNEL_BEGINS) and state.copy().allows_token(encode("Well")[0])
    assert not state.copy().allows_token(CHANNEL_BEGINS)
