"""Writes the tool calls of Gemma 4 as rules of a Lark grammar, so that arguments fit a JSON schema.

A call is `<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`. Strings are written without escapes
between two `<|"|>`, which is one token. Numbers, booleans and null are those of JSON. Keys have no
quotation marks and come in the order in which the model's template writes them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from vllm_dllm.grammar.patterns import FORMATS, check_alone, unanchored_lark_regex
from vllm_dllm.grammar.schema_forms import KIND_OF_KEY, KINDS, Form, JsonSchema
from vllm_dllm.grammar.schema_keys import SchemaError

CALL, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
ANY = r"/(?s:.*)/"
_SOME_TEXT = r"/(?s:.+)/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_PLAIN_KEY = re.compile(r"[^:{}\[\],\"'<>\s]+")
_NO_SPACES = {"x-guidance": {"whitespace_flexible": False}}
_COMMA = ' "," '  # a literal between two parts of a rule
_DEEPEST = 200
"""The most keys and indices of a schema's path."""
_ANYTHING = "anything"  # no reference, which would begin with "#"


class LarkRules:
    """The rules and terminals of one Lark grammar. It makes up their names."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._terminals: dict[str, str] = {}  # names, by body

    def add_rule(self, body: str, attribute: str = "") -> str:
        """Adds a rule and returns its name. `attribute` follows the name, such as "[lazy]"."""
        name = self.reserve_rule()
        self.define_rule(name, body, attribute)
        return name

    def reserve_rule(self) -> str:
        """Returns the name of a rule for `define_rule`, whose body refers to itself."""
        self.rules.append("")
        return f"rule_{len(self.rules) - 1}"

    def define_rule(self, name: str, body: str, attribute: str = "") -> None:
        """Sets the body of a rule that `reserve_rule` has named."""
        self.rules[int(name.removeprefix("rule_"))] = f"{name}{attribute}: {body}"

    def add_terminal(self, body: str) -> str:
        """Adds a terminal if none has this body yet, and returns its name. `body` has regular
        expressions joined by `&`, `|` and `~`."""
        if body not in self._terminals:
            self._terminals[body] = f"TERMINAL_{len(self._terminals)}"
        return self._terminals[body]

    def to_text(self, start: str) -> str:
        """Returns the grammar's text. `start`: the body of its first rule, mostly a rule's name."""
        terminals = [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, *terminals]) + "\n"


def quote_literal(text: str) -> str:
    """Returns the text as a quoted string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def calls_rule(
    lark: LarkRules,
    functions: Mapping[str, Any],  # name -> JSON schema of its arguments
    *,
    at_least_one: bool,
    stop_after_first: bool,
) -> str:
    """Returns the body of a rule for calls of the functions, and adds the rules that it uses to
    `lark`. Without `at_least_one` the rule also allows free text, with or without calls after it.
    With `stop_after_first` it allows at most one call. Raises SchemaError if there is no function,
    or a name or a schema cannot be used; the message says which, and where."""
    if not functions:
        raise SchemaError("functions must not be empty")
    bodies = []
    for name, schema in functions.items():
        if not _PLAIN_KEY.fullmatch(name):
            raise SchemaError(f"function {name!r}: its name must be letters, digits, '_' or '-'")
        try:
            arguments = _ArgumentRules(lark, schema).add_arguments_rule()
        except SchemaError as error:
            raise SchemaError(f"function {name!r}: {error}") from error
        bodies.append(f"{quote_literal(f'call:{name}')} {arguments}")
    call = lark.add_rule(f"{CALL} ({' | '.join(bodies)}) {END}")
    several = call if stop_after_first else f"{call}+"
    if at_least_one:
        return several
    text = lark.add_terminal(f"{_SOME_TEXT} & {_texts_without(CALL)}")
    return f"{text}? ({several})?"


def _texts_without(text: str) -> str:
    """Returns a regular expression of Lark for all texts that do not contain `text`. A parser would
    read the name of a special token as that token, even if other tokens spell it."""
    return f"~/(?s:.*){regex_to_lark(re.escape(text))}(?s:.*)/"


class _ArgumentRules:
    """Adds rules for the arguments of one function to a grammar. Methods named `..._rule` add a
    rule and return its name. Methods named `..._body` return the body of a rule. All raise
    SchemaError for a schema that cannot be used; `path` is the schema's JSON pointer, which the
    error names."""

    def __init__(self, lark: LarkRules, schema: Any) -> None:
        self._lark, self._schemas = lark, JsonSchema(schema)
        self._rule_by_reference: dict[str, str] = {}

    def add_arguments_rule(self) -> str:
        """Adds the rule for all arguments in braces, and returns its name. Raises SchemaError if
        the schema is not one of an object, or cannot be used."""
        root = self._schemas.root
        forms = [form for form in self._schemas.forms(root, "#") if form.kind == "object"]
        if not forms:
            raise SchemaError("# must be the schema of an object")
        return self._lark.add_rule(" | ".join(self._object_body(form) for form in forms))

    def _value_rule(self, schema: Any, path: str) -> str:
        """Adds the rule for the values of a schema, and returns its name. All references to one
        schema share one rule, so that a schema may refer to itself."""
        reference = self._schemas.reference(schema)
        if reference is None:
            return self._lark.add_rule(self._value_body(schema, path))
        if reference not in self._rule_by_reference:
            name = self._rule_by_reference[reference] = self._lark.reserve_rule()
            referred = self._schemas.resolve(reference, path)
            self._lark.define_rule(name, self._value_body(referred, reference))
        return self._rule_by_reference[reference]

    def _value_body(self, schema: Any, path: str) -> str:
        """Returns the body of a rule for the values of a schema."""
        if schema is True or schema == {}:
            return self._any_value_rule()
        if path.count("/") > _DEEPEST:
            raise SchemaError(f"{path[:80]}... must not refer to itself beside other keys")
        if (union := self._schemas.union(schema, path)) is not None:
            return " | ".join(self._value_rule(one, place) for one, place in union)
        return " | ".join(self._form_body(form) for form in self._schemas.forms(schema, path))

    def _any_value_rule(self) -> str:
        """Adds the rule for any value at the first call, and returns its name."""
        if _ANYTHING not in self._rule_by_reference:
            name = self._rule_by_reference[_ANYTHING] = self._lark.reserve_rule()
            forms = [self._form_body(Form(kind, {}, "#")) for kind in KINDS]
            self._lark.define_rule(name, " | ".join(forms))
        return self._rule_by_reference[_ANYTHING]

    def _form_body(self, form: Form) -> str:
        """Returns the body of a rule for the values of one form."""
        if form.kind in ("integer", "number", "boolean", "null"):
            limits = {k: v for k, v in form.schema.items() if KIND_OF_KEY.get(k) == "number"}
            limits = limits if form.kind in ("integer", "number") else {}
            schema = json.dumps({**limits, "type": form.kind, **_NO_SPACES})
            check_alone("json_schema", schema, form.path)
            return f"%json {schema}"
        if form.kind not in _BODY_BY_KIND:
            raise SchemaError(f"{form.path}/type must be a type of JSON, got {form.kind!r}")
        return f"({_BODY_BY_KIND[form.kind](self, form)})"

    def _string_body(self, form: Form) -> str:
        """Returns a rule's body for a string of the form's length, `pattern` and `format`."""
        schema, parts = form.schema, [_texts_without(QUOTE)]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            if most != "" and most < least:
                raise SchemaError(f"{form.path}/maxLength must be at least {least}, got {most}")
            parts.insert(0, f"/(?s:.{{{least},{most}}})/")
        if "pattern" in schema:
            parts.insert(0, f"/{unanchored_lark_regex(schema['pattern'], f'{form.path}/pattern')}/")
        if schema.get("format") in FORMATS:
            parts.insert(0, f"/{regex_to_lark(FORMATS[schema['format']])}/")
        if len(parts) == 1:
            parts.insert(0, ANY)
        return f"{QUOTE} {self._lark.add_terminal(' & '.join(parts))} {QUOTE}"

    def _array_body(self, form: Form) -> str:
        """Returns the body of a rule for an array. With `prefixItems` it has exactly these items,
        or `minItems` items if that is more."""
        schema, path = form.schema, form.path
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise SchemaError(f"{path}/minItems must be at most {most}, got {least}")
        if most == 0:
            return '"[]"'
        ones = [
            self._value_rule(one, f"{path}/prefixItems/{i}") for i, one in enumerate(first[:most])
        ]
        if ones and least <= len(ones):
            return f'"[" {_COMMA.join(ones)} "]"'
        item = self._value_rule(items, f"{path}/items")
        if ones:
            return f'"[" {_COMMA.join([*ones, *[item] * (least - len(ones))])} "]"'
        rest = _repeat(f'"," {item}', least - 1, None if most is None else most - 1)
        return f'"[" {item} {rest} "]"' if least else f'"[" ({item} {rest})? "]"'

    def _object_body(self, form: Form) -> str:
        """Returns the body of a rule for an object of the properties that the schema names. If it
        names none, the object may have any properties whose values fit `additionalProperties`."""
        schema, path = form.schema, form.path
        named, required = dict(schema.get("properties", {})), schema.get("required", [])
        added = schema.get("additionalProperties", True)
        for name in required:
            if name not in named:
                if added is False:
                    raise SchemaError(f"{path}/required names {name!r}, which is not a property")
                named[name] = added
        # The rules below keep the number of properties between these, and that of a map.
        bounds = (("minProperties", len(required).__ge__), ("maxProperties", len(named).__le__))
        for key, holds in bounds:
            if key in schema and not holds(schema[key]):
                raise SchemaError(f"{path}/{key} is not supported in the arguments of calls")
        if not named:
            most = schema.get("maxProperties")
            if added is False or most == 0:
                return '"{}"'
            value = self._value_rule(added, f"{path}/additionalProperties")
            pair = f'{self._lark.add_terminal(_KEY)} ":" {value}'
            rest = _repeat(f'"," {pair}', 0, None if most is None else most - 1)
            return f'"{{" ({pair} {rest})? "}}"'
        return f'"{{" {self._pairs_rule(named, required, path)} "}}"'

    def _pairs_rule(self, named: Mapping[str, Any], required: Sequence[str], path: str) -> str:
        """Adds the rule for pairs of key and value, and returns its name. The pairs come in the
        order of the model's template, jinja's `dictsort`."""
        # From the last pair to the first. `first` has the pairs from here on if none precedes them,
        # and `rest` if one is.
        first = rest = '""'
        for name in sorted(named, key=str.lower, reverse=True):
            value = self._value_rule(named[name], f"{path}/properties/{name}")
            pair = self._lark.add_rule(f"{_key_literal(name, path)} {value}")
            begun = f"{pair} {rest}"
            if name in required:
                first, rest = self._lark.add_rule(begun), self._lark.add_rule(f'"," {begun}')
            else:
                first = self._lark.add_rule(f"{begun} | {first}")
                rest = self._lark.add_rule(f'("," {pair})? {rest}')
        return first


_BODY_BY_KIND: dict[str, Callable[[_ArgumentRules, Form], str]] = {
    "values": lambda rules, form: " | ".join(
        _value_literal(value, form.path) for value in form.schema["enum"]
    ),
    "string": _ArgumentRules._string_body,
    "array": _ArgumentRules._array_body,
    "object": _ArgumentRules._object_body,
}


def _key_literal(name: str, path: str) -> str:
    """Returns the name of a property and the colon after it, as a part of a Lark rule. Raises
    SchemaError if the name has the model's quotation mark in it."""
    if _PLAIN_KEY.fullmatch(name):
        return quote_literal(f"{name}:")
    if QUOTE in name:
        raise SchemaError(f"{path}/properties has a name with {QUOTE} in it, got {name!r}")
    return f'{QUOTE} {quote_literal(name)} {QUOTE} ":"'


def _repeat(rule: str, least: int, most: int | None) -> str:
    """Returns a part of a Lark rule: `least` to `most` repetitions of `rule`. None: any number."""
    least = max(least, 0)
    if most is None:
        return f"({rule}){{{least},{least}}} ({rule})*" if least else f"({rule})*"
    most = max(most, least)
    return f"({rule}){{{least},{most}}}" if most else ""


def _value_literal(value: Any, path: str) -> str:
    """Returns one JSON value as the model writes it, as a part of a Lark rule. Raises SchemaError
    if a text has the model's quotation mark in it."""
    if isinstance(value, str):
        if QUOTE in value:
            raise SchemaError(f"{path} has a text with {QUOTE} in it, got {value!r}")
        return f"{QUOTE} {quote_literal(value)} {QUOTE}" if value else f"{QUOTE} {QUOTE}"
    if isinstance(value, list):
        return f'"[" {_COMMA.join(_value_literal(one, path) for one in value)} "]"'
    if isinstance(value, dict):
        keys = sorted(value, key=str.lower)
        pairs = [f"{_key_literal(name, path)} {_value_literal(value[name], path)}" for name in keys]
        return f'"{{" {_COMMA.join(pairs)} "}}"'
    return quote_literal(json.dumps(value))
