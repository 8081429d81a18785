"""Translates structural tags into Lark grammars. Tags come in xgrammar's form, which vLLM's tool
parsers write, or in the older form with `structures` and `triggers`. A format of our own,
`gemma4_calls`, stands for the tool calls of Gemma 4.

vLLM translates only the older form, and takes triggers in angle brackets for special tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from vllm_dllm.grammar.gemma_calls import calls_rule
from vllm_dllm.grammar.lark import LarkRules, quote_literal

_ANY_TEXT = r"/(.|\n)*/"


def structural_tag_to_lark(tag: Mapping[str, Any]) -> str:
    """Returns the text of the grammar for a tag: an object with `format`, or with `structures` and
    `triggers`.

    Raises:
        ValueError: a format or one of its options is unknown; the message says where.
        KeyError: a format lacks a key.
    """
    lark = LarkRules()
    node = tag["format"] if "format" in tag else _convert_older_form(tag)
    return lark.to_text(_add_format_rule(lark, node, "format"))


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


def _add_format_rule(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Adds the rule for a format to `lark`, and returns the rule's name. `path` is the format's
    place in the tag, which errors name. Raises ValueError for an unknown type or option."""
    kind = node["type"]
    if kind not in _FORMATS:
        raise ValueError(f"{path}.type must be one of {sorted(_FORMATS)}, got {kind!r}")
    if node.get("excludes"):
        raise ValueError(f"{path}.excludes is not supported, got {node['excludes']!r}")
    return lark.add_rule(_FORMATS[kind](lark, node, path))


# Each of the following functions returns the body of the rule for formats of one type.


def _json_schema(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Returns the body for a JSON value that fits `json_schema`. Raises ValueError for another
    style."""
    if (style := node.get("style", "json")) != "json":
        raise ValueError(f"{path}.style must be 'json', got {style!r}")
    return f"%json {json.dumps(node['json_schema'])}"


def _regex(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    return f"/{regex_to_lark(node['pattern'])}/"


def _grammar(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    return f"%lark {{\n{any_to_lark(node['grammar'])}\n}}"


def _sequence(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    return " ".join(_elements(lark, node, path))


def _choice(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    return " | ".join(_elements(lark, node, path))


def _elements(lark: LarkRules, node: Mapping[str, Any], path: str) -> list[str]:
    """Adds the rules for the elements of a format to `lark`, and returns the rules' names."""
    return [
        _add_format_rule(lark, element, f"{path}.elements[{i}]")
        for i, element in enumerate(node["elements"])
    ]


def _repeated(sign: str) -> Callable[[LarkRules, Mapping[str, Any], str], str]:
    """Returns a function that writes the body for a format's content, followed by `sign`: `?`, `+`
    or `*`."""

    def body(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
        return f"{_add_format_rule(lark, node['content'], f'{path}.content')}{sign}"

    return body


def _tag(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    _check_begin(node, path)
    return f"{quote_literal(node['begin'])} {_content_and_end(lark, node, path)}"


def _check_begin(node: Mapping[str, Any], path: str) -> None:
    """Raises ValueError unless a tag's `begin` is text."""
    if not isinstance(node["begin"], str):
        raise ValueError(f"{path}.begin must be text, got {node['begin']!r}")


def _content_and_end(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Returns the body for the part of a tag after its `begin`. Raises ValueError if `end` is no
    text."""
    ends = [node["end"]] if isinstance(node["end"], str) else node["end"]
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise ValueError(f"{path}.end must be text, or a list of texts, got {node['end']!r}")
    content = node["content"]
    if content["type"] == "any_text" and all(ends):  # up to the first end
        options = (lark.add_rule(f"{_ANY_TEXT} {quote_literal(end)}", "[lazy]") for end in ends)
        return f"({' | '.join(options)})"
    content_rule = _add_format_rule(lark, content, f"{path}.content")
    return f"{content_rule} ({' | '.join(map(quote_literal, ends))})"


def _triggered_tags(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Returns the body for free text in which a trigger begins one of the format's tags. Where
    `at_least_one` demands a tag, the text begins with it, as in xgrammar."""
    free, at_once = [], []
    for i, tag in enumerate(node["tags"]):
        place = f"{path}.tags[{i}]"
        _check_begin(tag, place)
        begin = tag["begin"]
        trigger = next((text for text in node["triggers"] if begin.startswith(text)), None)
        if not trigger:
            raise ValueError(
                f"{place}.begin must start with one of {node['triggers']}, got {begin!r}"
            )
        inside = _content_and_end(lark, tag, place)
        head = lark.add_rule(f"{_ANY_TEXT} {quote_literal(trigger)}", "[lazy]")
        free.append(lark.add_rule(f"{head} {quote_literal(begin[len(trigger) :])} {inside}"))
        at_once.append(lark.add_rule(f"{quote_literal(begin)} {inside}"))
    later, first = f"({' | '.join(free)})", f"({' | '.join(at_once)})"
    text = lark.add_rule(lark.add_terminal(_ANY_TEXT))
    if node.get("stop_after_first"):
        return first if node.get("at_least_one") else f"{later} | {text}"
    return f"{first} {later}* {text}" if node.get("at_least_one") else f"{later}* {text}"


def _tags_with_separator(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Returns the body for tags with `separator` between them. With `stop_after_first` there is at
    most one tag."""
    tags = [_add_format_rule(lark, tag, f"{path}.tags[{i}]") for i, tag in enumerate(node["tags"])]
    one = lark.add_rule(" | ".join(tags))
    if node.get("stop_after_first"):
        return one if node.get("at_least_one") else f"{one}?"
    several = f"{one} ({quote_literal(node['separator'])} {one})*"
    return several if node.get("at_least_one") else f"({several})?"


def _gemma4_calls(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Returns the body for tool calls in Gemma 4's syntax. The format has `functions`, each with
    its `name` and the JSON schema of its `parameters`. Raises ValueError if a schema cannot be
    used."""
    return calls_rule(
        lark,
        {one["name"]: one["parameters"] for one in node["functions"]},
        at_least_one=bool(node.get("at_least_one")),
        stop_after_first=bool(node.get("stop_after_first")),
    )


_FORMATS: dict[str, Callable[[LarkRules, Mapping[str, Any], str], str]] = {
    "const_string": lambda lark, node, path: quote_literal(node["value"]),
    "json_schema": _json_schema,
    "any_text": lambda lark, node, path: _ANY_TEXT,
    "regex": _regex,
    "grammar": _grammar,
    "sequence": _sequence,
    "or": _choice,
    "optional": _repeated("?"),
    "plus": _repeated("+"),
    "star": _repeated("*"),
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
    "gemma4_calls": _gemma4_calls,
}
