"""Gemma 4's calls, `<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`, as rules of a Lark grammar, so
that their arguments fit a JSON schema.

Strings stand as they are between two `<|"|>`, which is one token; numbers, booleans and null are
JSON's; keys have no quotation marks and come in the order in which the model's template writes
them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from vllm_dllm.grammar.lark import LarkRules, literal
from vllm_dllm.grammar.patterns import FORMATS
from vllm_dllm.grammar.schema_forms import KIND_OF_KEY, KINDS, Form, SchemaError, Schemas

CALL, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
ANY = r"/(?s:.*)/"
_SOME_TEXT = r"/(?s:.+)/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_PLAIN_KEY = re.compile(r"[^:{}\[\],\"'<>\s]+")
_NO_SPACES = {"x-guidance": {"whitespace_flexible": False}}
_DEEPEST = 200
_ANYTHING = "anything"  # no reference, which would begin with "#"


def calls_rule(
    lark: LarkRules,
    functions: Mapping[str, Any],  # the JSON schema of each one's arguments, by name
    *,
    at_least_one: bool,
    stop_after_first: bool,
) -> str:
    """The body of a rule for calls of these functions; without `at_least_one`, for free text with
    or without calls behind it.

    Raises:
        SchemaError: a name or a schema cannot be used; says which, and where.
    """
    if not functions:
        raise SchemaError("functions must not be empty")
    bodies = []
    for name, schema in functions.items():
        if not _PLAIN_KEY.fullmatch(name):
            raise SchemaError(f"function {name!r}: its name must be letters, digits, '_' or '-'")
        try:
            arguments = _Arguments(lark, schema).rule()
        except SchemaError as error:
            raise SchemaError(f"function {name!r}: {error}") from error
        bodies.append(f"{literal(f'call:{name}')} {arguments}")
    call = lark.add(f"{CALL} ({' | '.join(bodies)}) {END}")
    several = call if stop_after_first else f"{call}+"
    if at_least_one:
        return several
    text = lark.terminal(f"{_SOME_TEXT} & {_without(CALL)}")
    return f"{text}? ({several})?"


def _without(text: str) -> str:
    """What has a token's name in it, spelt with others, would be read as that token."""
    return f"~/(?s:.*){regex_to_lark(re.escape(text))}(?s:.*)/"


class _Arguments:
    """The form of one function's arguments."""

    def __init__(self, lark: LarkRules, schema: Any) -> None:
        self._lark, self._schemas = lark, Schemas(schema)
        self._referred: dict[str, str] = {}  # names of rules, by reference

    def rule(self) -> str:
        """The name of the rule for all arguments, in braces."""
        root = self._schemas.root
        forms = [form for form in self._schemas.forms(root, "#") if form.kind == "object"]
        if not forms:
            raise SchemaError("# must be the schema of an object")
        return self._lark.add(" | ".join(self._object(form) for form in forms))

    def _value(self, schema: Any, path: str) -> str:
        """The name of the rule for a value."""
        reference = self._schemas.reference(schema)
        if reference is None:
            return self._lark.add(self._body(schema, path))
        if reference not in self._referred:
            name = self._referred[reference] = self._lark.reserve()
            self._lark.define(name, self._body(self._schemas.at(reference, path), reference))
        return self._referred[reference]

    def _body(self, schema: Any, path: str) -> str:
        """The body of a rule for the values that a schema allows."""
        if schema is True or schema == {}:
            return self._anything()
        if path.count("/") > _DEEPEST:
            raise SchemaError(f"{path[:80]}... must not refer to itself beside other keys")
        if (union := self._schemas.union(schema, path)) is not None:
            return " | ".join(self._value(one, place) for one, place in union)
        return " | ".join(self._of_form(form) for form in self._schemas.forms(schema, path))

    def _anything(self) -> str:
        if _ANYTHING not in self._referred:
            name = self._referred[_ANYTHING] = self._lark.reserve()
            forms = [self._of_form(Form(kind, {}, "#")) for kind in KINDS]
            self._lark.define(name, " | ".join(forms))
        return self._referred[_ANYTHING]

    def _of_form(self, form: Form) -> str:
        """The body of a rule for the values of one form."""
        if form.kind in ("integer", "number", "boolean", "null"):
            limits = {k: v for k, v in form.schema.items() if KIND_OF_KEY.get(k) == "number"}
            limits = limits if form.kind in ("integer", "number") else {}
            return f"%json {json.dumps({**limits, 'type': form.kind, **_NO_SPACES})}"
        if form.kind not in _BY_KIND:
            raise SchemaError(f"{form.path}/type must be a type of JSON, got {form.kind!r}")
        return f"({_BY_KIND[form.kind](self, form)})"

    def _values(self, form: Form) -> str:
        return " | ".join(_written(value, form.path) for value in form.schema["enum"])

    def _string(self, form: Form) -> str:
        schema, parts = form.schema, [_without(QUOTE)]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            if most != "" and most < least:
                raise SchemaError(f"{form.path}/maxLength must be at least {least}, got {most}")
            parts.insert(0, f"/(?s:.{{{least},{most}}})/")
        if "pattern" in schema:
            parts.insert(0, f"/{_found_in_text(schema['pattern'], f'{form.path}/pattern')}/")
        if schema.get("format") in FORMATS:
            parts.insert(0, f"/{regex_to_lark(FORMATS[schema['format']])}/")
        if len(parts) == 1:
            parts.insert(0, ANY)
        return f"{QUOTE} {self._lark.terminal(' & '.join(parts))} {QUOTE}"

    def _array(self, form: Form) -> str:
        schema, path = form.schema, form.path
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise SchemaError(f"{path}/minItems must be at most {most}, got {least}")
        if most == 0:
            return '"[]"'
        ones = [self._value(one, f"{path}/prefixItems/{i}") for i, one in enumerate(first[:most])]
        if ones and least <= len(ones):
            return f'"[" {_separated(ones)} "]"'
        item = self._value(items, f"{path}/items")
        if ones:
            return f'"[" {_separated([*ones, *[item] * (least - len(ones))])} "]"'
        rest = _repeated(f'"," {item}', least - 1, None if most is None else most - 1)
        return f'"[" {item} {rest} "]"' if least else f'"[" ({item} {rest})? "]"'

    def _object(self, form: Form) -> str:
        """Makes an object of the properties that are named; where none is, of any that may be
        added."""
        schema, path = form.schema, form.path
        named, required = dict(schema.get("properties", {})), schema.get("required", [])
        added = schema.get("additionalProperties", True)
        for name in required:
            if name not in named:
                if added is False:
                    raise SchemaError(f"{path}/required names {name!r}, which is not a property")
                named[name] = added
        self._check_counts(form, len(required), len(named))
        if not named:
            if added is False:
                return '"{}"'
            value = self._value(added, f"{path}/additionalProperties")
            pair = f'{self._lark.terminal(_KEY)} ":" {value}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        return f'"{{" {self._pairs(named, required, path)} "}}"'

    def _check_counts(self, form: Form, least: int, most: int) -> None:
        """An object gets at least what is required, and at most what is named."""
        for key, holds in (("minProperties", least.__ge__), ("maxProperties", most.__le__)):
            if key in form.schema and not holds(form.schema[key]):
                raise SchemaError(f"{form.path}/{key} is not supported in the arguments of calls")

    def _pairs(self, named: Mapping[str, Any], required: Sequence[str], path: str) -> str:
        """Makes pairs in the order of the model's template, jinja's `dictsort`."""
        first = rest = '""'  # of those that are still to come: before the first one, and behind it
        for name in sorted(named, key=str.lower, reverse=True):
            pair = self._lark.add(
                f"{_key(name, path)} {self._value(named[name], f'{path}/properties/{name}')}"
            )
            begun = f"{pair} {rest}"
            if name in required:
                first, rest = self._lark.add(begun), self._lark.add(f'"," {begun}')
            else:
                first = self._lark.add(f"{begun} | {first}")
                rest = self._lark.add(f'("," {pair})? {rest}')
        return first


_BY_KIND: dict[str, Callable[[_Arguments, Form], str]] = {
    "values": _Arguments._values,
    "string": _Arguments._string,
    "array": _Arguments._array,
    "object": _Arguments._object,
}


def _key(name: str, path: str) -> str:
    if _PLAIN_KEY.fullmatch(name):
        return literal(f"{name}:")
    if QUOTE in name:
        raise SchemaError(f"{path}/properties has a name with {QUOTE} in it, got {name!r}")
    return f'{QUOTE} {literal(name)} {QUOTE} ":"'


def _separated(parts: Sequence[str]) -> str:
    return ' "," '.join(parts)


def _repeated(rule: str, least: int, most: int | None) -> str:
    least = max(least, 0)
    if most is None:
        return f"({rule}){{{least},{least}}} ({rule})*" if least else f"({rule})*"
    most = max(most, least)
    return f"({rule}){{{least},{most}}}" if most else ""


def _written(value: Any, path: str) -> str:
    """Writes a value as the model does."""
    if isinstance(value, str):
        if QUOTE in value:
            raise SchemaError(f"{path} has a text with {QUOTE} in it, got {value!r}")
        return f"{QUOTE} {literal(value)} {QUOTE}" if value else f"{QUOTE} {QUOTE}"
    if isinstance(value, list):
        return f'"[" {_separated([_written(one, path) for one in value])} "]"'
    if isinstance(value, dict):
        names = sorted(value, key=str.lower)
        pairs = [f"{_key(name, path)} {_written(value[name], path)}" for name in names]
        return f'"{{" {_separated(pairs)} "}}"'
    return literal(json.dumps(value))


def _found_in_text(pattern: str, path: str) -> str:
    """The expression of all texts in which `pattern` is found, as JSON schema means it."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _has_alternatives(inner):
        raise SchemaError(f"{path} must have its alternatives in parentheses, got {pattern!r}")
    try:
        inner = regex_to_lark(inner)
    except ValueError as error:
        raise SchemaError(f"{path} cannot be used: {error}") from error
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _has_alternatives(pattern: str) -> bool:
    """Outside of parentheses."""
    depth = 0
    for sign in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False
