"""Refuses grammars in which one text would have to match many regular expressions at once.

llguidance takes twice as long for each further one: an hour for thirty, and a JSON schema of one
kilobyte has room for them.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from vllm_dllm.grammar.compiler import (
    VALUE_KEYS,
    GrammarError,
    check_grammar_size,
    check_schema_size,
)
from vllm_dllm.grammar.schema_keys import MAPS, NOTES

MAX_JOINED = 16
"""The most patterns that one text may have to match. They take a tenth of a second."""
_INLINE_SCHEMA = re.compile(r"%json\s*")


def check_joined_patterns(schema: Any) -> None:
    """Raises GrammarError if a JSON schema may join more than `MAX_JOINED` patterns or has a
    pattern that is too long. `schema` may be a structural tag, whose grammars are checked, too.

    Which patterns meet is not worked out. Where a schema joins others, all patterns inside of it
    count, and all patterns anywhere if it has a `$ref` inside.
    """
    everywhere = set(islice(_all_patterns(schema), MAX_JOINED + 1))
    _check_schema(schema, "#", everywhere)


def check_lark(text: str) -> None:
    """Raises GrammarError if a client's Lark grammar may join more than `MAX_JOINED` patterns, or
    has a JSON schema inside that is too large, or joins as many."""
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
