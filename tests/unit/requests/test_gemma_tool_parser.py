"""What `gemma4_strict` asks the engine for. Gemma 4's calls are read as they were meant, in
whatever pieces they come, and not before they have come whole. Answers with calls and reasoning,
cut at every length and by every stop, streamed in every way: both ways of answering agree, no
marker is shown, and no call is reported that was not made."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.gemma_answers import read_whole_answer
from tests.patched import patched
from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import IDS
from vllm_dllm.compat.parsers import show_prompts_to_parsers
from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE
from vllm_dllm.requests.gemma_reader import GemmaReader, overlap_length
from vllm_dllm.requests.gemma_reasoning_parser import GemmaReasoningParser
from vllm_dllm.requests.gemma_tool_parser import GemmaToolParser
from vllm_dllm.requests.structural_tag import structural_tag_to_lark

SHIPPED = CHECKPOINTS / "diffusiongemma-tiny"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]


def chat(**options: Any) -> ChatCompletionRequest:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "tools": TOOLS}
    return ChatCompletionRequest(**{**asked, **options})


def adjusted(tokenizer: Any, request: Any) -> dict[str, Any] | None:
    """The format that is asked for."""
    found = GemmaToolParser(tokenizer, request.tools).adjust_request(request)
    if found.structured_outputs is None:
        return None
    assert not found.skip_special_tokens
    tag = json.loads(found.structured_outputs.structural_tag)
    assert "<|tool_call>" in structural_tag_to_lark(tag)
    return tag["format"]


NAMED = {"type": "function", "function": {"name": "g"}}
CHOICES: dict[str, tuple[dict[str, Any], list[str], bool, bool]] = {
    "auto": ({"tool_choice": "auto"}, ["f", "g"], False, False),
    "nothing said": ({}, ["f", "g"], False, False),
    "required": ({"tool_choice": "required"}, ["f", "g"], True, False),
    "required, one": (
        {"tool_choice": "required", "parallel_tool_calls": False},
        ["f", "g"],
        True,
        True,
    ),
    "named": ({"tool_choice": NAMED}, ["g"], True, True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_asked_for(tokenizer: Any, name: str) -> None:
    options, names, must_come, is_single = CHOICES[name]
    form = adjusted(tokenizer, chat(**options))
    assert form is not None and form["type"] == "gemma4_calls"
    assert [one["name"] for one in form["functions"]] == names
    assert (form["at_least_one"], form["stop_after_first"]) == (must_come, is_single)


def test_responses(tokenizer: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    choice = {"type": "function", "name": "f"}
    form = adjusted(tokenizer, ResponsesRequest(input="Hi", tools=tools, tool_choice=choice))
    assert form is not None and form["functions"] == [{"name": "f", "parameters": SCHEMA}]
    assert form["at_least_one"]


def test_a_form_beside_calls(tokenizer: Any) -> None:
    """An answer is one or the other; where a call must come, it is that."""
    json_object = {"type": "json_object"}
    form = adjusted(tokenizer, chat(response_format=json_object, tool_choice="auto"))
    assert form is not None and form["type"] == "or"
    assert [one["type"] for one in form["elements"]] == ["gemma4_calls", "json_schema"]
    assert form["elements"][0]["at_least_one"]
    grammar = {"grammar": 'start: "a"'}
    form = adjusted(tokenizer, chat(structured_outputs=grammar, tool_choice="auto"))
    assert form is not None and form["elements"][1] == {"type": "grammar", **grammar}
    form = adjusted(tokenizer, chat(response_format=json_object, tool_choice="required"))
    assert form is not None and form["type"] == "gemma4_calls"


def test_nothing_is_asked_for_without_tools(tokenizer: Any) -> None:
    assert adjusted(tokenizer, chat(tools=None)) is None
    assert adjusted(tokenizer, chat(tool_choice="none")) is None


def test_a_function_that_is_not_there(tokenizer: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    allowed = [{"type": "function", "name": name} for name in ("f", "h")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    request = ResponsesRequest(input="Hi", tools=tools, tool_choice=choice)
    with pytest.raises(VLLMValidationError, match=r"must name one of the tools \['f'\], got 'h'"):
        adjusted(tokenizer, request)


def test_a_tokenizer_without_the_tokens() -> None:
    with pytest.raises(RuntimeError, match="needs a tokenizer with the tokens"):
        GemmaToolParser(AutoTokenizer.from_pretrained(SHIPPED))


# Without what would be read as a token, or as the beginning of one.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: not any(name in text for name in IDS) and not overlap_length(text, QUOTE)
)
KEY = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY, inner, max_size=4),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(KEY, VALUE, max_size=4)


def written(value: Any) -> str:
    """As Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return "{" + ",".join(f"{key}:{written(one)}" for key, one in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


@given(st.lists(ARGUMENTS, min_size=1, max_size=3))
@settings(deadline=None)
def test_what_the_template_writes_is_read(found: list[dict[str, Any]]) -> None:
    text = "Well. " + "".join(call(f"f{i}", one) for i, one in enumerate(found))
    around, calls = read_whole_answer(text)
    assert around == "Well." and [one.name for one in calls] == [f"f{i}" for i in range(len(found))]
    assert [json.loads(one.arguments) for one in calls] == found


@given(ARGUMENTS, ARGUMENTS)
@settings(deadline=None, max_examples=50)
def test_a_cut_call_is_none(first: dict[str, Any], second: dict[str, Any]) -> None:
    text = f"So: {call('first', first)}{call('second', second)}"
    whole = read_whole_answer(text)[1]
    ends = [i for i in range(len(text)) if text.startswith(END, i)]
    for cut in range(len(text)):
        around, calls = read_whole_answer(text[:cut])
        assert calls == whole[: sum(end <= cut for end in ends)]
        # Of a marker's beginning only a stop string can be to blame.
        assert around.startswith(text[: min(cut, 3)]) and CALL not in around


CASES = {
    "spaces": ("{ a : 1 , b:[ 1, 2 ] }", {"a": 1, "b": [1, 2]}),
    "a bare word": ("{a:red}", {"a": "red"}),
    "a key in quotes": (f"{{{QUOTE}a:b{QUOTE}:1}}", {"a:b": 1}),
    "signs in a text": (f'{{a:{QUOTE}}},]"\\ <|tool_call>{QUOTE}}}', {"a": '},]"\\ <|tool_call>'}),
    "digits in a text": (f"{{a:{QUOTE}51{QUOTE},b:51}}", {"a": "51", "b": 51}),
    "nothing": ("{}", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_models_write_it(name: str) -> None:
    text, expected = CASES[name]
    ((one,)) = read_whole_answer(f"<|tool_call>call:f{text}<tool_call|>")[1]
    assert json.loads(one.arguments) == expected


@pytest.mark.parametrize("text", ["f{}", "call:f{a:1 b:2}x", "call:f{a:[1}", "call:f<"])
def test_what_is_no_call_is_text(text: str) -> None:
    assert read_whole_answer(f"<|tool_call>{text}<tool_call|>") == (text, [])


STOPPED = {"in the middle": "call", "at the end": ">", "over it": ": <|tool", "included": "tool"}


@pytest.mark.parametrize("name", STOPPED)
def test_a_marker_that_a_stop_string_has_cut_is_no_text(name: str) -> None:
    stop, text = STOPPED[name], f"So: {CALL}"
    reader = GemmaReader()
    around, _ = reader.read_piece(
        text[: text.index(stop) + (len(stop) if name == "included" else 0)]
    )
    assert "So: ".startswith(around + reader.finish([stop]))


def test_what_only_looks_like_a_marker_is_text() -> None:
    assert read_whole_answer("<") == ("<", []) and read_whole_answer("a <tr") == ("a <tr", [])
    reader = GemmaReader(reads_calls=False)
    assert reader.read_piece(call("f", {"a": "b"})) == ("call:f{a:b}", [])


WALL_AND_MAP = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("wall", "map")
]
WALL = call("wall", {"pig": [51, 76], "wolf": 6})
MAP = call("map", {"nest": 'a "<b>" <tool', "n": True})
MARKERS = [*IDS, "<turn|>"]
EOS = "<turn|>"
ANSWERS = {
    "a call": WALL,
    "text and a call": f"\n So:\n{WALL}\n",
    "two calls": f"{MAP}{WALL}",
    "text": "a < b <t d",
    "what is no call": "<|tool_call>wall(1)<tool_call|> so",
    "going on": f"so{EOS}{EOS}{EOS}",
}
THOUGHT = "<|channel>thought\nHm x.<channel|>"


@dataclass
class Seen:
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def request(**options: Any) -> ChatCompletionRequest:
    return chat(**{"tools": WALL_AND_MAP, "skip_special_tokens": False, **options})


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What only a server replaces."""
    name = "vllm.entrypoints.launchers.launcher"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with patched("parser.parser_manager:ParserManager.get_parser"):
        show_prompts_to_parsers()
        yield


def parser_class(*, reasons: bool, calls: bool = True) -> Any:
    ToolParserManager.register_module("gemma4_strict", True, GemmaToolParser)
    ReasoningParserManager.register_module("gemma4", True, GemmaReasoningParser)
    names = "gemma4_strict" if calls else None, "gemma4" if reasons else None
    return ParserManager.get_parser(*names, True)


def pieces(
    tokenizer: Any, tokens: list[int], sizes: list[int], stop: list[str], ends: list[int]
) -> tuple[list[tuple[str, list[int]]], str]:
    """What the engine sends of an answer that comes in blocks of `sizes`, and its whole text."""
    params = SamplingParams(stop=stop, skip_special_tokens=False, stop_token_ids=ends)
    wanted = EngineCoreRequest("r", [2], None, params, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, wanted)
    found, sent, begin = [], 0, 0
    for size in sizes:
        block = tokens[begin : begin + size]
        begin += size
        end = next((i for i, token in enumerate(block) if token in ends), None)
        block = block if end is None else block[: end + 1]
        is_stopped = detokenizer.update(block, end is not None) is not None or end is not None
        is_last = is_stopped or begin >= len(tokens)
        text = detokenizer.get_next_output_text(is_last, delta=True)
        ids = detokenizer.output_token_ids
        found.append((text, list(ids[sent:])))
        sent = len(ids)
        if is_last:
            break
    return found, detokenizer.output_text


PROMPT = (2,)


def whole(parser: Any, text: str, asked: Any, prompt: Sequence[int] = PROMPT) -> Seen:
    parser.set_prompt_token_ids(prompt)
    reasoning, content, calls = parser.parse(text, asked, enable_auto_tools=True)
    return Seen(reasoning or "", content or "", [(c.name, c.arguments) for c in calls or ()])


def streamed(
    parser: Any, found: list[tuple[str, list[int]]], asked: Any, prompt: Sequence[int] = PROMPT
) -> Seen:
    seen = Seen()
    for i, (text, ids) in enumerate(found):
        delta = parser.parse_delta(text, ids, asked, [*prompt], finished=i + 1 == len(found))
        if delta is None:
            continue
        seen.reasoning += delta.reasoning or ""
        seen.content += delta.content or ""
        for part in delta.tool_calls or ():
            assert part.index == len(seen.calls) and part.id
            seen.calls.append((part.function.name, part.function.arguments))
    return seen


def cuts(text: str, num_tokens: int) -> Iterator[tuple[int, list[str], list[str]]]:
    """Most tokens, stop strings, and names of stop tokens."""
    for most in range(1, num_tokens + 1):
        yield most, [], []
    stops = {text[i : i + n] for i in range(len(text)) for n in (1, 3, 7)}
    stops |= {name[i : i + n] for name in IDS if name in text for i in range(12) for n in (1, 4)}
    for stop in sorted(stops - {""}):
        yield num_tokens, [stop], []
    for name in MARKERS:
        yield num_tokens, [], [name]


# With reasoning there are three times as many cuts: `make test` tries those of one answer.
@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        *(pytest.param(name, False, id=name) for name in ANSWERS),
        *(
            pytest.param(name, True, id=f"{name}, reasoning", marks=marks)
            for name in ANSWERS
            for marks in [() if name == "what is no call" else pytest.mark.slow]
        ),
    ],
)
def test_every_cut(tokenizer: Any, name: str, reasons: bool) -> None:
    text = (THOUGHT if reasons else "") + ANSWERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    parsers = parser_class(reasons=reasons)
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    uncut = whole(parsers(tokenizer, WALL_AND_MAP, **thinks), text, request())
    tried = 0
    for choice in ("auto", "none"):
        for most, stop, ends in cuts(text, len(tokens)):
            asked = request(tool_choice=choice, stop=stop)
            end_ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
            kept = tokens[:most]
            for size in (1, 3, len(tokens)):
                sizes = [size] * (len(kept) // size + 1)
                found, output = pieces(tokenizer, kept, sizes, stop, end_ids)
                one = whole(parsers(tokenizer, WALL_AND_MAP, **thinks), output, asked)
                other = streamed(parsers(tokenizer, WALL_AND_MAP, **thinks), found, asked)
                place = (most, stop, ends, size, choice, output)
                assert one == other, place
                assert not any(m in one.content + one.reasoning for m in MARKERS), (place, one)
                assert one.calls == uncut.calls[: len(one.calls)], (place, one)
                if choice == "none":
                    assert not one.calls
                else:
                    assert uncut.content.startswith(one.content.rstrip()), (place, one)
                tried += 1
    assert tried >= 200
    print(f"{name}: {tried} cuts")


TURN = "<|turn>model\n"


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "no calls"])
@pytest.mark.parametrize("thinks", [True, False], ids=["thinks", "is not asked to think"])
@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (TURN, "<|channel>thought\nHm x.<channel|>so", Seen("Hm x.", "so")),
        (TURN, "so<channel|> it", Seen("", "so it")),
        (TURN, "a<image|><|tool_response>b", Seen("", "ab")),
        # Not a call: a grammar after the reasoning begins at its end.
        (TURN, '<|channel>Hm <|"|>x<tool_call|>.<channel|>so', Seen("Hm x.", "so")),
        (f"{TURN}<|channel>thought\n", "Hm x.<channel|>so", Seen("Hm x.", "so")),
        (f"{TURN}<|channel>thought\n", "Hm x.", Seen("Hm x.", "")),
        (f"{TURN}<|channel>thought\n", "Hm<image|> x.", Seen("Hm x.", "")),
        (f"{TURN}<|channel>thought\n<channel|>", "so", Seen("", "so")),
        (
            f"{TURN}<|channel>thought\n<channel|>",
            "<|channel>thought\nHm x.<channel|>so",
            Seen("Hm x.", "so"),
        ),
    ],
)
def test_what_the_prompt_has_begun(
    tokenizer: Any, prompt: str, answer: str, expected: Seen, thinks: bool, calls: bool
) -> None:
    """Templates of Gemma 4 begin the reasoning after a tool's response, and end it at once where a
    request asks for none."""
    options = {"chat_template_kwargs": {"enable_thinking": True}} if thinks else {}
    before = tokenizer.encode(prompt, add_special_tokens=False)
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    asked = request(**({} if calls else {"tools": None}))
    parsers = parser_class(reasons=True, calls=calls)
    for size in (1, 3, len(tokens)):
        found, output = pieces(tokenizer, tokens, [size] * len(tokens), [], [])
        assert whole(parsers(tokenizer, WALL_AND_MAP, **options), output, asked, before) == expected
        assert (
            streamed(parsers(tokenizer, WALL_AND_MAP, **options), found, asked, before) == expected
        )


def test_reasoning_needs_a_tokenizer_with_the_tokens() -> None:
    plain = AutoTokenizer.from_pretrained(CHECKPOINTS / "diffusiongemma-tiny-tools")
    parser_class(reasons=True)
    with pytest.raises(TypeError, match=r"gemma4 needs a tokenizer with the tokens <\|channel>"):
        ParserManager.get_parser("gemma4_strict", "gemma4", True, tokenizer=plain)
