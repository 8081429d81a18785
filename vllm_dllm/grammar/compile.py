"""From the text of a grammar to its start. Compiled once per text, copied per request."""

import threading
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher

from vllm_dllm.grammar.exclusions import Exclusions
from vllm_dllm.grammar.reasoning import Reasoning
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

_MOST_BYTES = {"json": 128 << 10, "structural_tag": 128 << 10, "choice": 64 << 10}
_MOST_BYTES_ELSE = 16 << 10
"""Longer grammars are refused: llguidance takes seconds for a regex of 64 KiB, minutes for 90,000
alternatives."""
_MOST_ENTRIES = 300
"""Of an object or a list in a JSON schema."""
_MOST_REPETITIONS = 10_000
_BOUNDS = ("minItems", "maxItems", "minProperties", "maxProperties")
_VALUES = ("enum", "const", "required", "default", "examples")
"""What holds no schemas, and costs little."""
_KEPT = 256


class GrammarError(ValueError):
    """A grammar that cannot be used; says why in one line."""


class Grammars:
    """Compiles grammars of one vocabulary, for all threads of a process."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        vocabulary.spaces  # noqa: B018 (of a large vocabulary this takes a while; not in a step)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(
        self,
        text: str,
        stops: frozenset[int],
        exclusions: Exclusions | None = None,
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
    ) -> GrammarState:
        """The state before the first token of an answer to `text`, llguidance's form of a grammar,
        or before that of the reasoning that comes first.

        `stops` end the answer where the grammar is complete; so does the tokenizer's own. None of
        them does if it is excluded, or before `min_tokens` others as long as the answer can go on.

        Raises:
            GrammarError: the grammar is wrong, or has no answer.
        """
        with self._lock:
            matcher = self._compiled.get(text)
            if matcher is not None:
                self._compiled.move_to_end(text)
        if matcher is None:
            matcher = compile_grammar(self.vocabulary, text)
            with self._lock:
                self._compiled[text] = matcher
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        ends = stops | {self.vocabulary.tokenizer.eos_token}
        if exclusions is not None:
            ends = frozenset(end for end in ends if not exclusions.excludes(end, ()))
        return GrammarState(
            matcher.deep_copy(), self.vocabulary, ends, exclusions, min_tokens, reasoning
        )


def check_size(kind: str, spec: str) -> None:
    """Checks what a client sent, before anything is made of it. Raises GrammarError."""
    most = _MOST_BYTES.get(kind, _MOST_BYTES_ELSE)
    if len(spec) > most:
        raise GrammarError(f"it must be at most {most} bytes, got {len(spec)}. Shorten it")


def check_schema(schema: Any, path: str = "#") -> None:
    """Checks a JSON schema: llguidance takes minutes for some thousands of properties, and ends the
    process where thousands of definitions refer to each other. Raises GrammarError."""
    if isinstance(schema, dict):
        _check_count(len(schema), path)
        for key, value in schema.items():
            place = f"{path}/{key}"
            if key in _BOUNDS and isinstance(value, int) and value > _MOST_REPETITIONS:
                raise GrammarError(f"{place} must be at most {_MOST_REPETITIONS}, got {value}")
            if key not in _VALUES:
                check_schema(value, place)
    elif isinstance(schema, list):
        _check_count(len(schema), path)
        for i, value in enumerate(schema):
            check_schema(value, f"{path}/{i}")


def _check_count(count: int, path: str) -> None:
    if count > _MOST_ENTRIES:
        raise GrammarError(f"{path} must have at most {_MOST_ENTRIES} entries, got {count}")


def compile_grammar(vocabulary: GrammarVocabulary, text: str) -> LLMatcher:
    """Raises GrammarError, see `Grammars.start`."""
    matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds out whether anything may come first
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def first_line(error: str) -> str:
    line = " ".join(error.partition("<state>")[0].split())
    if line in ("", "NoExtension", "NoExtensionBias"):
        return "no text satisfies it"
    return line
