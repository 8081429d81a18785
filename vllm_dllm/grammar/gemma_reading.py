"""Reads Gemma 4's calls, also ones that have not come to their end, and writes their arguments as
JSON. What is written of a call that is cut stays as it is when more of it comes."""

import json
from dataclasses import dataclass

from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON, as far as it has come
    is_complete: bool


class MalformedError(ValueError):
    """Text that is no call in Gemma 4's syntax; says where it differs."""


class _CutError(Exception):
    """The text ends here."""


def read_calls(text: str) -> tuple[str, list[Call]]:
    """The text around the calls, and the calls. One that is cut before its arguments is left out.

    Raises:
        MalformedError: what follows `<|tool_call>` is no call.
    """
    around, calls, at = [], [], 0
    while (begin := text.find(CALL, at)) >= 0:
        around.append(text[at:begin])
        reader = _Reader(text, begin + len(CALL))
        name = ""
        try:
            reader.expect("call:")
            name = reader.up_to("{")
            reader.expect("{")
            reader.rest_of_object()
            reader.expect(END)
        except _CutError:
            if reader.json:
                calls.append(Call(name, "".join(reader.json), is_complete=False))
            return "".join(around), calls
        calls.append(Call(name, "".join(reader.json), is_complete=True))
        at = reader.at
    return "".join([*around, text[at:]]), calls


class _Reader:
    def __init__(self, text: str, at: int) -> None:
        self._text, self.at = text, at
        self.json: list[str] = []  # what has been written

    def takes(self, expected: str) -> bool:
        """Whether `expected` comes next, which is then behind us."""
        if self._text.startswith(expected, self.at):
            self.at += len(expected)
            return True
        if expected.startswith(self._text[self.at :]):
            raise _CutError
        return False

    def expect(self, expected: str) -> None:
        if not self.takes(expected):
            came = self._text[self.at : self.at + 20]
            raise MalformedError(f"expected {expected!r}, got {came!r}")

    def up_to(self, end: str) -> str:
        found = self._text.find(end, self.at)
        if found < 0:
            raise _CutError
        before, self.at = self._text[self.at : found], found
        return before.strip(_SPACE)

    def rest_of_object(self) -> None:
        self.json.append("{")
        if not self._takes_end("}"):
            while True:
                self._key()
                self._value()
                if self._takes_end("}"):
                    break
                self.expect(",")
                self.json.append(", ")
        self.json.append("}")

    def _rest_of_list(self) -> None:
        self.json.append("[")
        if not self._takes_end("]"):
            while True:
                self._value()
                if self._takes_end("]"):
                    break
                self.expect(",")
                self.json.append(", ")
        self.json.append("]")

    def _takes_end(self, end: str) -> bool:
        self._skip_spaces()
        return self.takes(end)

    def _key(self) -> None:
        self._skip_spaces()
        if self.takes(QUOTE):
            name = self._text[self.at :].partition(QUOTE)[0]
            self.at += len(name)
            self.expect(QUOTE)
        else:
            name = self.up_to(":")
        self.expect(":")
        self.json.append(f"{json.dumps(name, ensure_ascii=False)}: ")

    def _value(self) -> None:
        self._skip_spaces()
        if self.takes(QUOTE):
            self._rest_of_string()
        elif self.takes("{"):
            self.rest_of_object()
        elif self.takes("["):
            self._rest_of_list()
        else:
            self._word()

    def _rest_of_string(self) -> None:
        end = self._text.find(QUOTE, self.at)
        value = self._text[self.at : None if end < 0 else end]
        if end < 0:
            value = value[: len(value) - overlap(value, QUOTE)]
        written = json.dumps(value, ensure_ascii=False)
        if end < 0:
            self.json.append(written[:-1])
            raise _CutError
        self.json.append(written)
        self.at = end + len(QUOTE)

    def _word(self) -> None:
        """A number, a boolean or null; any other is taken for text."""
        ends = [end for sign in ",}]" if (end := self._text.find(sign, self.at)) >= 0]
        if not ends:
            raise _CutError
        word, self.at = self._text[self.at : min(ends)].strip(_SPACE), min(ends)
        try:
            json.loads(word)
        except ValueError:
            word = json.dumps(word, ensure_ascii=False)
        self.json.append(word)

    def _skip_spaces(self) -> None:
        while self._text[self.at : self.at + 1] in tuple(_SPACE):
            self.at += 1


def overlap(text: str, word: str) -> int:
    """Characters at the end of `text` with which `word` begins, but less than all of it."""
    lengths = range(min(len(text), len(word) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(word[:n])), 0)
