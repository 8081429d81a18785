"""Reads an answer of Gemma 4: its calls, with arguments as JSON, and the text around them.

vLLM's own parser cannot do it: it takes a call that was cut for a whole one, tells `51` and
`<|"|>51<|"|>` apart by the schema alone, and reads a marker inside of a text as the end of a call.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE

MARKERS = frozenset({CALL, END, QUOTE})
_PART = re.compile(
    rf"{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}|(?P<sign>[][{{}},:])|(?P<word>[^][{{}},:<]+)",
    re.DOTALL,
)
_HEAD = re.compile(r"call:(?P<name>[^{<]*)\{")
_WRITTEN = {",": ", ", ":": ": "}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


class _CutError(Exception):
    """What has come so far may still become a call."""


class _MalformedError(ValueError):
    """What has come so far is the beginning of no call."""


class GemmaReader:
    """Reads one answer, in as many pieces as it comes in. A call is one from where its arguments
    end; what is written in the place of a call, but is none, is text. No marker stands in the
    text."""

    def __init__(self, markers: Collection[str] = MARKERS, *, reads_calls: bool = True) -> None:
        self._markers, self._reads_calls = markers, reads_calls
        self._marker = re.compile("|".join(map(re.escape, markers)))
        self._rest = ""  # which only what follows tells what it is
        self._blank = ""  # whitespace, which is no content before a call, nor behind the last one
        self._has_calls = False

    def read(self, text: str) -> tuple[str, list[Call]]:
        """The next piece: what is known of the text around the calls, and which calls have come."""
        text, around, calls, at = self._rest + text, self._blank, [], 0
        end = len(text)
        while marker := self._marker.search(text, at):
            around, at = around + text[at : marker.start()], marker.end()
            if marker.group() != CALL or not self._reads_calls:
                continue
            try:
                call, at = _read_call(text, at)
            except _MalformedError:
                continue
            except _CutError:
                end = at = marker.start()
                break
            calls.append(call)
            around = around.rstrip()
        else:
            end -= max((overlap(text[at:], marker) for marker in self._markers), default=0)
        around, self._rest = around + text[at:end], text[end:]
        content = around.rstrip()
        self._blank = around[len(content) :]
        self._has_calls |= bool(calls)
        return content, calls

    def finish(self, stops: Collection[str] = ()) -> str:
        """The rest of the text. One of the `stops` may have cut it amid a marker."""
        rest, self._rest = self._rest, ""
        if rest.startswith(CALL) or cut_marker(rest, self._markers, stops):
            rest = ""
        blank, self._blank = self._blank, ""
        return blank + rest if rest or not self._has_calls else ""


def read_calls(text: str) -> tuple[str, list[Call]]:
    """Parts a whole answer into the text around the calls, and the calls."""
    reader = GemmaReader()
    around, calls = reader.read(text)
    return around + reader.finish(), calls


def _read_call(text: str, begin: int) -> tuple[Call, int]:
    """The call whose marker ends at `begin`, and where its arguments end."""
    head = _HEAD.match(text, begin)
    if head is None:
        came = text[begin:]
        if "call:".startswith(came) or re.fullmatch(r"call:[^{<]*", came):
            raise _CutError
        raise _MalformedError
    parts, depth, word = ["{"], 1, ""
    at = begin
    for at, kind, part in _parts(text, head.end()):  # noqa: B007 (read behind the loop)
        if kind == "word":
            word = part.strip()
            continue
        if kind == "text":
            parts.append(json.dumps(part, ensure_ascii=False))
            continue
        if word:
            parts.append(json.dumps(word, ensure_ascii=False) if part == ":" else _value(word))
            word = ""
        parts.append(_WRITTEN.get(part, part))
        depth += (part in "{[") - (part in "}]")
        if depth == 0:
            break
    arguments = "".join(parts)
    try:
        json.loads(arguments)
    except ValueError as error:
        raise _MalformedError from error
    return Call(head["name"].strip(), arguments), at


def _parts(text: str, at: int) -> Iterator[tuple[int, str, str]]:
    """Where each part of the arguments ends, its kind and what it is. Raises _CutError at the end
    of a text that does not end the call, and _MalformedError where no part begins."""
    while at < len(text):
        found = _PART.match(text, at)
        if found is None:
            if text.startswith(QUOTE, at) or QUOTE.startswith(text[at:]):
                raise _CutError
            raise _MalformedError
        at = found.end()
        assert found.lastgroup is not None
        yield at, found.lastgroup, found[found.lastgroup]
    raise _CutError


def _value(word: str) -> str:
    """JSON of a number, a boolean or null; any other word is taken for text."""
    try:
        json.loads(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def cut_marker(text: str, markers: Collection[str], stops: Collection[str]) -> bool:
    """Whether `text` is the beginning of a marker that one of the `stops` may have cut."""
    behind = [marker[len(text) :] for marker in markers if text and marker.startswith(text)]
    return any(_may_cut(stop, text, rest) for rest in behind for stop in stops)


def _may_cut(stop: str, before: str, behind: str) -> bool:
    """Whether `stop` may be why a marker is cut between `before` and `behind`."""
    is_left_out = behind.startswith(stop) or stop.startswith(behind)
    return is_left_out or before.endswith(stop) or stop.endswith(before)


def overlap(text: str, word: str) -> int:
    """Characters at the end of `text` with which `word` begins, but less than all of it."""
    lengths = range(min(len(text), len(word) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(word[:n])), 0)
