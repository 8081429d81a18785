"""Reads an answer of Gemma 4: its tool calls, with arguments as JSON, and the text around them.

vLLM's own parser takes an unfinished call for a whole one, tells `51` and `<|"|>51<|"|>` apart only
by the schema, and reads a marker inside of a text as the end of a call.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm.tokenizers import TokenizerLike

from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE

MARKERS = frozenset({CALL, END, QUOTE})
_MARKER = re.compile(r"<\|[^<>]+>|<[^<>]+\|>")
"""Names of Gemma 4's special tokens. Other added tokens are words."""
_ARGUMENT_PART = re.compile(
    rf"{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}|(?P<sign>[][{{}},:])|(?P<word>[^][{{}},:<]+)",
    re.DOTALL,
)
_CALL_HEAD = re.compile(r"call:(?P<name>[^{<]*)\{")
_SEPARATORS = {",": ", ", ":": ": "}  # as `json.dumps` writes them


@dataclass(frozen=True)
class Call:
    """A tool call that is complete."""

    name: str
    arguments: str  # an object in JSON


class _UnfinishedError(Exception):
    """The text that has come may still become a call."""


class _MalformedError(ValueError):
    """The text that has come is not the beginning of a call."""


class GemmaReader:
    """Reads one answer, piece by piece. A call is returned when its arguments end. Malformed calls
    are text, from which markers are left out. With `reads_calls` False all calls are text."""

    def __init__(self, markers: Collection[str] = MARKERS, *, reads_calls: bool = True) -> None:
        """Starts an answer. `markers` are the texts of tokens that are not shown."""
        self._markers, self._reads_calls = markers, reads_calls
        self._marker = re.compile("|".join(map(re.escape, markers)))
        self._rest = ""  # text that may be the beginning of a call or a marker
        self._spaces = ""  # whitespace that is not shown if a call or the end follows
        self._has_calls = False

    def read_piece(self, text: str) -> tuple[str, list[Call]]:
        """Reads the next piece. Returns the text around the calls that is certain by now and was
        not returned before, and the calls that have ended with this piece."""
        text, around, calls, at = self._rest + text, self._spaces, [], 0
        end = len(text)
        while marker := self._marker.search(text, at):
            around, at = around + text[at : marker.start()], marker.end()
            if marker.group() != CALL or not self._reads_calls:
                continue
            try:
                call, at = _read_call(text, at)
            except _MalformedError:
                continue
            except _UnfinishedError:
                end = at = marker.start()
                break
            calls.append(call)
            around = around.rstrip()
        else:
            end -= max((overlap_length(text[at:], one) for one in self._markers), default=0)
        around, self._rest = around + text[at:end], text[end:]
        content = around.rstrip()
        self._spaces = around[len(content) :]
        self._has_calls |= bool(calls)
        return content, calls

    def finish(self, stops: Collection[str] = ()) -> str:
        """Ends the answer, and returns the rest of its text. The rest is left out if it is an
        unfinished call, or a marker that one of the request's stop strings `stops` may have cut."""
        rest, self._rest = self._rest, ""
        if rest.startswith(CALL) or is_cut_marker(rest, self._markers, stops):
            rest = ""
        spaces, self._spaces = self._spaces, ""
        return spaces + rest if rest or not self._has_calls else ""


def _read_call(text: str, begin: int) -> tuple[Call, int]:
    """Returns the call whose marker ends at index `begin`, and the index after it. Raises
    _UnfinishedError if the text ends before the call, and _MalformedError if it is no call."""
    head = _CALL_HEAD.match(text, begin)
    if head is None:
        came = text[begin:]
        if "call:".startswith(came) or re.fullmatch(r"call:[^{<]*", came):
            raise _UnfinishedError
        raise _MalformedError
    parts, depth, word = ["{"], 1, ""
    at = begin
    for at, kind, part in _argument_parts(text, head.end()):  # noqa: B007 (read after the loop)
        if kind == "word":
            word = part.strip()
            continue
        if kind == "text":
            parts.append(json.dumps(part, ensure_ascii=False))
            continue
        if word:
            parts.append(json.dumps(word, ensure_ascii=False) if part == ":" else _word_json(word))
            word = ""
        parts.append(_SEPARATORS.get(part, part))
        depth += (part in "{[") - (part in "}]")
        if depth == 0:
            break
    arguments = "".join(parts)
    try:
        json.loads(arguments)
    except ValueError as error:
        raise _MalformedError from error
    return Call(head["name"].strip(), arguments), at


def _argument_parts(text: str, at: int) -> Iterator[tuple[int, str, str]]:
    """Yields for each part of the arguments, from index `at` on, the index after it, its kind (a
    group of `_ARGUMENT_PART`) and its text. Raises _UnfinishedError at the end of `text`, and
    _MalformedError where no part begins."""
    while at < len(text):
        match = _ARGUMENT_PART.match(text, at)
        if match is None:
            if text.startswith(QUOTE, at) or QUOTE.startswith(text[at:]):
                raise _UnfinishedError
            raise _MalformedError
        at = match.end()
        assert match.lastgroup is not None
        yield at, match.lastgroup, match[match.lastgroup]
    raise _UnfinishedError


def _word_json(word: str) -> str:
    """Returns a number, a boolean or null unchanged, and any other word as a JSON string."""
    try:
        json.loads(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


@lru_cache(maxsize=8)
def find_markers(tokenizer: TokenizerLike) -> frozenset[str]:
    """Returns the texts of special tokens that are not shown to clients. Cached by tokenizer."""
    named = filter(_MARKER.fullmatch, tokenizer.get_added_vocab())
    return MARKERS.union(tokenizer.all_special_tokens, named)


def is_cut_marker(text: str, markers: Collection[str], stops: Collection[str]) -> bool:
    """Returns whether `text` is the beginning of a marker, and one of the stop strings `stops` may
    have cut the marker after it."""
    after = [marker[len(text) :] for marker in markers if text and marker.startswith(text)]
    return any(
        # Left out, or kept in what was sent.
        rest.startswith(stop) or stop.startswith(rest) or text.endswith(stop) or stop.endswith(text)
        for rest in after
        for stop in stops
    )


def stop_strings(request: Any) -> list[str]:
    """Returns the stop strings of an HTTP request as a list, whether none, one or several."""
    stop = getattr(request, "stop", None) or []
    return [stop] if isinstance(stop, str) else stop


def overlap_length(text: str, word: str) -> int:
    """Returns the length of the longest end of `text` that begins `word`, but is not all of it."""
    lengths = range(min(len(text), len(word) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(word[:n])), 0)
