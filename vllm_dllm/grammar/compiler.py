"""Compiles grammars, each text once for all requests that have it. Refuses grammars for which
llguidance would take minutes: those that are too large, and those in which one text would have to
match many regular expressions at once. It takes twice as long for each further one: an hour for
thirty, and a JSON schema of one kilobyte has room for them."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

from llguidance import LLMatcher

from vllm_dllm.grammar.masks import Exclusions
from vllm_dllm.grammar.schema_keys import MAPS, NOTES
from vllm_dllm.grammar.state import GrammarState, Reasoning
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

_MAX_BYTES = {"json": 128 << 10, "structural_tag": 128 << 10, "choice": 64 << 10}
_MAX_BYTES_ELSE = 16 << 10
"""Longer grammars are refused: llguidance takes seconds for a regex of 64 KiB, minutes for 90,000
alternatives."""
_MAX_ENTRIES = 300
"""The most entries of an object or a list in a JSON schema."""
_MAX_REPETITIONS = 10_000
_COUNT_KEYS = ("minItems", "maxItems", "minProperties", "maxProperties")
VALUE_KEYS = ("enum", "const", "required", "default", "examples")
"""Keys whose values are no schemas, and cost little."""
_MAX_COMPILED = 256


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why in one line."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the `_MAX_COMPILED` that were used last.
    Threads may share it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        vocabulary.num_spaces  # noqa: B018 (takes a while for a large vocabulary: not in a step)
        self._compile_once = lru_cache(_MAX_COMPILED)(self._compile)

    def start_state(
        self,
        text: str,
        stops: frozenset[int],
        exclusions: Exclusions | None = None,
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
    ) -> GrammarState:
        """Returns the state before the first token of an answer, for the grammar `text` in
        llguidance's form. Raises GrammarError if the grammar is wrong, or no text satisfies it.

        The tokens `stops`, and the tokenizer's EOS, end the answer where the grammar is complete.
        Excluded tokens do not end it. While the answer has fewer than `min_tokens` tokens and can
        go on, no token ends it. `reasoning` None: the answer begins at once.
        """
        ends = stops | {self.vocabulary.tokenizer.eos_token}
        if exclusions is not None:
            ends = frozenset(end for end in ends if not exclusions.excludes(end, ()))
        matcher = self._compile_once(text).deep_copy()
        return GrammarState(matcher, self.vocabulary, ends, exclusions, min_tokens, reasoning)

    def _compile(self, text: str) -> LLMatcher:
        """Returns the matcher of a grammar, which nothing may move. Raises GrammarError if the
        grammar is wrong, or no text satisfies it."""
        matcher = LLMatcher(self.vocabulary.tokenizer, text, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether anything may come first
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(_describe_error(matcher.get_error()))
        return matcher


def check_grammar_size(kind: str, spec: str) -> None:
    """Raises GrammarError if a client's grammar is too long. `kind` is a key of structured outputs,
    such as "json" or "regex", and decides how long `spec` may be."""
    max_bytes = _MAX_BYTES.get(kind, _MAX_BYTES_ELSE)
    if (size := len(spec.encode())) > max_bytes:
        raise GrammarError(f"it must be at most {max_bytes} bytes, got {size}. Shorten it")


def check_schema_size(schema: Any, path: str = "#") -> None:
    """Raises GrammarError if a JSON schema has too many entries in an object or a list, or too high
    a count such as `maxItems`. `path` is the schema's JSON pointer, which the error names.
    llguidance takes minutes for some thousands of properties. It ends the process where thousands
    of definitions refer to each other."""
    if isinstance(schema, dict):
        _check_count(len(schema), path)
        for key, value in schema.items():
            place = f"{path}/{key}"
            if key in _COUNT_KEYS and isinstance(value, int) and value > _MAX_REPETITIONS:
                raise GrammarError(f"{place} must be at most {_MAX_REPETITIONS}, got {value}")
            if key in MAPS and isinstance(value, dict):
                _check_count(len(value), place)
                for name, entry in value.items():
                    check_schema_size(entry, f"{place}/{name}")
            elif key not in VALUE_KEYS:
                check_schema_size(value, place)
    elif isinstance(schema, list):
        _check_count(len(schema), path)
        for i, value in enumerate(schema):
            check_schema_size(value, f"{path}/{i}")


def _check_count(count: int, path: str) -> None:
    """Raises GrammarError if an object or a list has more than `_MAX_ENTRIES` entries."""
    if count > _MAX_ENTRIES:
        raise GrammarError(f"{path} must have at most {_MAX_ENTRIES} entries, got {count}")


def _describe_error(error: str) -> str:
    """Returns llguidance's error in one line, without the parser state that llguidance appends."""
    line = " ".join(error.partition("<state>")[0].split())
    if line in ("", "NoExtension", "NoExtensionBias"):
        return "no text satisfies it"
    return line


MAX_JOINED = 16
"""The most patterns that one text may have to match. They take a tenth of a second."""
_INLINE_SCHEMA = re.compile(r"%json\s*")


def check_joined_patterns(schema: Any) -> None:
    """Raises GrammarError if a JSON schema may join more than `MAX_JOINED` patterns or has a
    pattern that is too long. `schema` may be a structural tag, whose grammars are checked, too.
    Which patterns meet is not worked out. Where a schema joins others, all patterns inside of it
    count, and all patterns anywhere if it has a `$ref` inside."""
    everywhere = set(islice(_all_patterns(schema), MAX_JOINED + 1))
    _check_schema(schema, "#", everywhere)


def check_lark(text: str) -> None:
    """Raises GrammarError if a client's Lark grammar may join more than `MAX_JOINED` patterns, or
    if a JSON schema inside of it does, is too large, or is nested too deeply."""
    if (count := text.count("&")) > MAX_JOINED:
        raise GrammarError(f"it must have at most {MAX_JOINED} signs &, got {count}")
    for found in _INLINE_SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
            check_schema_size(schema)
            check_joined_patterns(schema)
        except json.JSONDecodeError:
            continue  # llguidance says what is wrong with it
        except RecursionError:
            raise GrammarError("a JSON schema in it is nested too deeply") from None


def _check_schema(schema: Any, path: str, everywhere: set[str]) -> set[str]:
    """Returns the patterns that count for `schema`, whose JSON pointer is `path`. Raises
    GrammarError as `check_joined_patterns` does."""
    joined: set[str] = set()
    if isinstance(schema, dict):
        own = _own_patterns(schema)
        for pattern in own:
            check_grammar_size("regex", pattern)
        joined |= own
        if "$ref" in schema:
            joined |= everywhere
        if isinstance(grammar := schema.get("grammar"), str):  # of a structural tag
            check_grammar_size("grammar", grammar)
            check_lark(grammar)
    for key, inner in _schemas_inside(schema):
        joined |= _check_schema(inner, f"{path}/{key}", everywhere)
    if len(joined) > MAX_JOINED and isinstance(schema, dict) and _joins(schema):
        raise GrammarError(
            f"{path} must not join more than {MAX_JOINED} patterns. Write fewer, or leave out what "
            f"joins them, such as allOf"
        )
    return joined


def _joins(schema: dict[str, Any]) -> bool:
    """Returns whether a value must fit several schemas to fit this one."""
    combined = schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
    parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    own = schema.keys() - NOTES - combined - {"type"}
    return len(parts) + len(combined - {"allOf"}) + bool(own) > 1


def _all_patterns(schema: Any) -> Iterator[str]:
    """Yields the patterns and formats anywhere in a schema."""
    if isinstance(schema, dict):
        yield from _own_patterns(schema)
    for _, inner in _schemas_inside(schema):
        yield from _all_patterns(inner)


def _own_patterns(schema: dict[str, Any]) -> set[str]:
    """Returns the pattern of a schema, and its format, which becomes a pattern."""
    return {schema[key] for key in ("pattern", "format") if isinstance(schema.get(key), str)}


def _schemas_inside(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects and lists directly inside of a schema that may be or have schemas, with
    their JSON pointers from there. Names of properties are not taken for keys."""
    if isinstance(schema, list):
        yield from ((str(i), one) for i, one in enumerate(schema) if isinstance(one, dict | list))
        return
    for key, inner in schema.items() if isinstance(schema, dict) else ():
        if key in MAPS and isinstance(inner, dict):
            named = ((f"{key}/{name}", one) for name, one in inner.items())
            yield from ((path, one) for path, one in named if isinstance(one, dict | list))
        elif key not in VALUE_KEYS and isinstance(inner, dict | list):
            yield key, inner
