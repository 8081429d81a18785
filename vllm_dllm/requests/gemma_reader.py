"""Reads an answer of Gemma 4: its tool calls, with arguments as JSON, and the text around them.

vLLM's own parser cannot do it: it takes an unfinished call for a whole one, tells `51` and
`<|"|>51<|"|>` apart by the schema alone, and reads a marker inside of a text as the end of a call.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE

MARKERS = frozenset({CALL, END, QUOTE})
_ARGUMENT_PART = re.compile(
    rf"{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}|(?P<sign>[][{{}},:])|(?P<word>[^][{{}},:<]+)",
    re.DOTALL,
)
_CALL_HEAD = re.compile(r"call:(?P<name>[^{<]*)\{")
_SEPARATORS = {",": ", ", ":": ": "}  # as `json.dumps` writes them


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: str  # JSON


class _UnfinishedError(Exception):
    """The text so far may still become a call."""


class _MalformedError(ValueError):
    """The text so far is not the beginning of a call."""


class GemmaReader:
    """Reads one answer, piece by piece. A call is known when its arguments end. Malformed calls are
    text; markers are left out of it."""

    def __init__(self, markers: Collection[str] = MARKERS, *, reads_calls: bool = True) -> None:
        self._markers, self._reads_calls = markers, reads_calls
        self._marker = re.compile("|".join(map(re.escape, markers)))
        self._rest = ""  # may be the beginning of a call or a marker
        self._spaces = ""  # whitespace, which is not shown before a call or after the last one
        self._has_calls = False

    def read_piece(self, text: str) -> tuple[str, list[Call]]:
        """Reads the next piece. Returns what is now known of the text around the calls, and the
        calls that have ended."""
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
        """Ends the answer, and returns the rest of its text. `stops`: the request's stop strings,
        one of which may have cut a marker."""
        rest, self._rest = self._rest, ""
        if rest.startswith(CALL) or is_cut_marker(rest, self._markers, stops):
            rest = ""
        spaces, self._spaces = self._spaces, ""
        return spaces + rest if rest or not self._has_calls else ""


def read_calls(text: str) -> tuple[str, list[Call]]:
    """Splits a whole answer into the text around the calls, and the calls."""
    reader = GemmaReader()
    around, calls = reader.read_piece(text)
    return around + reader.finish(), calls


def _read_call(text: str, begin: int) -> tuple[Call, int]:
    """Returns the call whose marker ends at `begin`, and where its arguments end. Raises
    _UnfinishedError or _MalformedError if there is no whole call."""
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
    """Yields where each part of the arguments ends, its kind (a group of `_ARGUMENT_PART`) and its
    text. Raises _UnfinishedError at the end of `text`, and _MalformedError where no part begins."""
    while at < len(text):
        found = _ARGUMENT_PART.match(text, at)
        if found is None:
            if text.startswith(QUOTE, at) or QUOTE.startswith(text[at:]):
                raise _UnfinishedError
            raise _MalformedError
        at = found.end()
        assert found.lastgroup is not None
        yield at, found.lastgroup, found[found.lastgroup]
    raise _UnfinishedError


def _word_json(word: str) -> str:
    """Returns a number, a boolean or null as it is, and any other word as a JSON string."""
    try:
        json.loads(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def is_cut_marker(text: str, markers: Collection[str], stops: Collection[str]) -> bool:
    """Returns whether `text` is the beginning of a marker that one of the stop strings may have
    cut."""
    after = [marker[len(text) :] for marker in markers if text and marker.startswith(text)]
    return any(_may_cut(stop, text, rest) for rest in after for stop in stops)


def _may_cut(stop: str, before: str, after: str) -> bool:
    """Returns whether a stop string may have cut a marker between `before` and `after`."""
    is_left_out = after.startswith(stop) or stop.startswith(after)
    return is_left_out or before.endswith(stop) or stop.endswith(before)


def overlap_length(text: str, word: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `word`; fewer than all
    of `word`."""
    lengths = range(min(len(text), len(word) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(word[:n])), 0)
