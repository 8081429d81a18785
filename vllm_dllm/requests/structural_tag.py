"""Translates structural tags into Lark grammars. Tags come in xgrammar's form, which vLLM's tool
parsers write, or in the older form with `structures` and `triggers`. A format of our own,
`gemma4_calls`, stands for the tool calls of Gemma 4.

vLLM translates only the older form, and takes triggers in angle brackets for special tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from vllm_dllm.grammar.gemma_calls import LarkRules, calls_rule, quote_literal

_ANY_TEXT = r"/(.|\n)*/"


class _Format(NamedTuple):
    """A format of a tag, which becomes a rule of a grammar."""

    lark: LarkRules  # gets the rules
    node: Mapping[str, Any]  # the format as the client or vLLM wrote it
    path: str  # place in the tag, which errors name

    def add_rule_of(self, node: Mapping[str, Any], place: str) -> str:
        """Adds the rule for a format inside of this one, and returns the rule's name. Raises
        ValueError as `_add_format_rule` does."""
        return _add_format_rule(_Format(self.lark, node, f"{self.path}.{place}"))

    def add_content_rule(self) -> str:
        """Adds the rule for the format's `content`, and returns the rule's name."""
        return self.add_rule_of(self.node["content"], "content")

    def add_rules_of_all(self, key: str) -> list[str]:
        """Adds the rules for the formats in the list `key`, and returns the rules' names."""
        return [self.add_rule_of(node, f"{key}[{i}]") for i, node in enumerate(self.node[key])]


def structural_tag_to_lark(tag: Mapping[str, Any]) -> str:
    """Returns the text of the grammar for a tag: an object with `format`, or with `structures` and
    `triggers`. Raises ValueError if a format or one of its options is unknown, whose message says
    where, and KeyError if a format lacks a key."""
    lark = LarkRules()
    node = tag["format"] if "format" in tag else _convert_older_form(tag)
    return lark.to_text(_add_format_rule(_Format(lark, node, "format")))


def _convert_older_form(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the format in xgrammar's form that has the meaning of a tag in the older form. Raises
    ValueError if the tag has no structures."""
    tags = [
        {
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    if not tags:
        raise ValueError("structures must not be empty")
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _add_format_rule(form: _Format) -> str:
    """Adds the rule for a format to its grammar, and returns the rule's name. Raises ValueError if
    the type, an option or a value of this format, or of one inside of it, cannot be used, and
    KeyError if such a format lacks a key."""
    kind = form.node["type"]
    if kind not in _BODY_BY_TYPE:
        raise ValueError(f"{form.path}.type must be one of {sorted(_BODY_BY_TYPE)}, got {kind!r}")
    if form.node.get("excludes"):
        raise ValueError(f"{form.path}.excludes is not supported, got {form.node['excludes']!r}")
    return form.lark.add_rule(_BODY_BY_TYPE[kind](form))


# Each of the following functions returns the body of the rule for formats of one type.


def _json_schema_body(form: _Format) -> str:
    """Returns the body for JSON that fits `json_schema`. Raises ValueError for another style."""
    if (style := form.node.get("style", "json")) != "json":
        raise ValueError(f"{form.path}.style must be 'json', got {style!r}")
    return f"%json {json.dumps(form.node['json_schema'])}"


def _tag_body(form: _Format) -> str:
    """Returns the body for a tag. Raises ValueError if `begin` is no text, or for its content."""
    return f"{quote_literal(_begin_of(form.node, form.path))} {_content_and_end(form)}"


def _begin_of(tag: Mapping[str, Any], path: str) -> str:
    """Returns the `begin` of a tag. Raises ValueError unless it is text."""
    if not isinstance(tag["begin"], str):
        raise ValueError(f"{path}.begin must be text, got {tag['begin']!r}")
    return tag["begin"]


def _content_and_end(form: _Format) -> str:
    """Returns the body for the part of a tag after its `begin`: the content, and one of the texts
    in `end`, which may be a single one or a list. Raises ValueError if `end` is neither, or as
    `_add_format_rule` does for the content."""
    node, lark = form.node, form.lark
    ends = [node["end"]] if isinstance(node["end"], str) else node["end"]
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise ValueError(f"{form.path}.end must be text, or a list of texts, got {node['end']!r}")
    if node["content"]["type"] == "any_text" and all(ends):  # up to the first end
        options = (lark.add_rule(f"{_ANY_TEXT} {quote_literal(end)}", "[lazy]") for end in ends)
        return f"({' | '.join(options)})"
    return f"{form.add_content_rule()} ({' | '.join(map(quote_literal, ends))})"


def _triggered_tags_body(form: _Format) -> str:
    """Returns the body for free text in which a trigger begins one of the format's tags. Where
    `at_least_one` demands a tag, the text begins with it, as in xgrammar. Raises ValueError if a
    tag begins with no trigger, or if one of its keys cannot be used, as in `_tag_body`."""
    node, lark = form.node, form.lark
    free, at_once = [], []
    for i, tag in enumerate(node["tags"]):
        place = f"{form.path}.tags[{i}]"
        begin = _begin_of(tag, place)
        trigger = next((text for text in node["triggers"] if begin.startswith(text)), None)
        if not trigger:
            raise ValueError(
                f"{place}.begin must start with one of {node['triggers']}, got {begin!r}"
            )
        inside = _content_and_end(_Format(lark, tag, place))
        head = lark.add_rule(f"{_ANY_TEXT} {quote_literal(trigger)}", "[lazy]")
        free.append(lark.add_rule(f"{head} {quote_literal(begin[len(trigger) :])} {inside}"))
        at_once.append(lark.add_rule(f"{quote_literal(begin)} {inside}"))
    later, first = f"({' | '.join(free)})", f"({' | '.join(at_once)})"
    text = lark.add_rule(lark.add_terminal(_ANY_TEXT))
    if node.get("stop_after_first"):
        return first if node.get("at_least_one") else f"{later} | {text}"
    return f"{first} {later}* {text}" if node.get("at_least_one") else f"{later}* {text}"


def _separated_tags_body(form: _Format) -> str:
    """Returns the body for tags with `separator` between them. With `stop_after_first` there is at
    most one tag. Raises ValueError for a tag that cannot be used."""
    node = form.node
    one = form.lark.add_rule(" | ".join(form.add_rules_of_all("tags")))
    if node.get("stop_after_first"):
        return one if node.get("at_least_one") else f"{one}?"
    several = f"{one} ({quote_literal(node['separator'])} {one})*"
    return several if node.get("at_least_one") else f"({several})?"


def _gemma4_calls_body(form: _Format) -> str:
    """Returns the body for tool calls in Gemma 4's syntax. The format has `functions`, each with
    `name` and the JSON schema of its `parameters`. Raises ValueError if a schema cannot be used."""
    return calls_rule(
        form.lark,
        {one["name"]: one["parameters"] for one in form.node["functions"]},
        at_least_one=bool(form.node.get("at_least_one")),
        stop_after_first=bool(form.node.get("stop_after_first")),
    )


_BODY_BY_TYPE: dict[str, Callable[[_Format], str]] = {
    "const_string": lambda form: quote_literal(form.node["value"]),
    "json_schema": _json_schema_body,
    "any_text": lambda form: _ANY_TEXT,
    "regex": lambda form: f"/{regex_to_lark(form.node['pattern'])}/",
    "grammar": lambda form: f"%lark {{\n{any_to_lark(form.node['grammar'])}\n}}",
    "sequence": lambda form: " ".join(form.add_rules_of_all("elements")),
    "or": lambda form: " | ".join(form.add_rules_of_all("elements")),
    "optional": lambda form: f"{form.add_content_rule()}?",
    "plus": lambda form: f"{form.add_content_rule()}+",
    "star": lambda form: f"{form.add_content_rule()}*",
    "tag": _tag_body,
    "triggered_tags": _triggered_tags_body,
    "tags_with_separator": _separated_tags_body,
    "gemma4_calls": _gemma4_calls_body,
}
