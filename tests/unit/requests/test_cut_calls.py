"""Answers with calls and reasoning, cut at every length and by every stop, streamed in every way:
both ways of answering agree, no marker is shown, and no call is reported that was not made."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.patched import patched
from tests.paths import CHECKPOINTS
from tests.unit.grammar.special_tokens import IDS
from tests.unit.requests.test_gemma_tool_parser import call
from vllm_dllm.compat.parsers import show_prompts_to_parsers
from vllm_dllm.requests.gemma_reasoning_parser import GemmaReasoningParser
from vllm_dllm.requests.gemma_tool_parser import GemmaToolParser

TOOLS = [
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
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "model": "m", "tools": TOOLS, "skip_special_tokens": False}
    return ChatCompletionRequest(**{**asked, **options})


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
    parser: Any,
    found: list[tuple[str, list[int]]],
    asked: Any,
    prompt: Sequence[int] = PROMPT,
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
    uncut = whole(parsers(tokenizer, TOOLS, **thinks), text, request())
    tried = 0
    for choice in ("auto", "none"):
        for most, stop, ends in cuts(text, len(tokens)):
            asked = request(tool_choice=choice, stop=stop)
            end_ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
            kept = tokens[:most]
            for size in (1, 3, len(tokens)):
                sizes = [size] * (len(kept) // size + 1)
                found, output = pieces(tokenizer, kept, sizes, stop, end_ids)
                one = whole(parsers(tokenizer, TOOLS, **thinks), output, asked)
                other = streamed(parsers(tokenizer, TOOLS, **thinks), found, asked)
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
        assert whole(parsers(tokenizer, TOOLS, **options), output, asked, before) == expected
        assert streamed(parsers(tokenizer, TOOLS, **options), found, asked, before) == expected


def test_a_tokenizer_without_the_tokens() -> None:
    plain = AutoTokenizer.from_pretrained(CHECKPOINTS / "diffusiongemma-tiny-tools")
    parser_class(reasons=True)
    with pytest.raises(TypeError, match=r"gemma4 needs a tokenizer with the tokens <\|channel>"):
        ParserManager.get_parser("gemma4_strict", "gemma4", True, tokenizer=plain)
