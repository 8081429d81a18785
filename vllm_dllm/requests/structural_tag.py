"""Structural tags as a Lark grammar: in the form of xgrammar, which vLLM's tool parsers write, with
a format of our own for Gemma 4's calls, and in the older one, of `structures` and `triggers`.

vLLM hands llguidance the older form only, and has it take triggers in angle brackets for tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from vllm_dllm.grammar.gemma_calls import calls_rule
from vllm_dllm.grammar.lark import LarkRules, literal

_ANY_TEXT = r"/(.|\n)*/"


def to_lark(tag: Mapping[str, Any]) -> str:
    """The grammar of `{"format": ...}` or `{"structures": [...], "triggers": [...]}`.

    Raises:
        ValueError: a format is unknown, or one of its options; says where.
        KeyError: a format lacks something.
    """
    lark = LarkRules()
    return lark.text(_format(lark, tag["format"] if "format" in tag else _older(tag), "format"))


def _older(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """The format that the older form means."""
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


def _format(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """The name of the rule for a node."""
    kind = node["type"]
    if kind not in _FORMATS:
        raise ValueError(f"{path}.type must be one of {sorted(_FORMATS)}, got {kind!r}")
    if node.get("excludes"):
        raise ValueError(f"{path}.excludes is not supported, got {node['excludes']!r}")
    return lark.add(_FORMATS[kind](lark, node, path))


def _json_schema(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
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
    return [
        _format(lark, element, f"{path}.elements[{i}]")
        for i, element in enumerate(node["elements"])
    ]


def _repeated(sign: str) -> Callable[[LarkRules, Mapping[str, Any], str], str]:
    def body(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
        return f"{_format(lark, node['content'], f'{path}.content')}{sign}"

    return body


def _tag(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    _check_begin(node, path)
    return f"{literal(node['begin'])} {_inside(lark, node, path)}"


def _check_begin(node: Mapping[str, Any], path: str) -> None:
    if not isinstance(node["begin"], str):
        raise ValueError(f"{path}.begin must be text, got {node['begin']!r}")


def _inside(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """A tag's content and its end."""
    ends = [node["end"]] if isinstance(node["end"], str) else node["end"]
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise ValueError(f"{path}.end must be text, or a list of texts, got {node['end']!r}")
    content = node["content"]
    if content["type"] == "any_text" and all(ends):  # up to the first end
        options = (lark.add(f"{_ANY_TEXT} {literal(end)}", "[lazy]") for end in ends)
        return f"({' | '.join(options)})"
    return f"{_format(lark, content, f'{path}.content')} ({' | '.join(map(literal, ends))})"


def _triggered_tags(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Free text in which a trigger begins one of its tags. Where one tag must come, it comes at
    once, as in xgrammar."""
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
        inside = _inside(lark, tag, place)
        head = lark.add(f"{_ANY_TEXT} {literal(trigger)}", "[lazy]")
        free.append(lark.add(f"{head} {literal(begin[len(trigger) :])} {inside}"))
        at_once.append(lark.add(f"{literal(begin)} {inside}"))
    later, first = f"({' | '.join(free)})", f"({' | '.join(at_once)})"
    text = lark.add(lark.terminal(_ANY_TEXT))
    if node.get("stop_after_first"):
        return first if node.get("at_least_one") else f"{later} | {text}"
    return f"{first} {later}* {text}" if node.get("at_least_one") else f"{later}* {text}"


def _tags_with_separator(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    tags = [_format(lark, tag, f"{path}.tags[{i}]") for i, tag in enumerate(node["tags"])]
    one = lark.add(" | ".join(tags))
    if node.get("stop_after_first"):
        return one if node.get("at_least_one") else f"{one}?"
    several = f"{one} ({literal(node['separator'])} {one})*"
    return several if node.get("at_least_one") else f"({several})?"


def _gemma4_calls(lark: LarkRules, node: Mapping[str, Any], path: str) -> str:
    """Ours, for Gemma 4's own syntax of calls: `functions`, each with its `name` and the JSON
    schema of its `parameters`."""
    return calls_rule(
        lark,
        {one["name"]: one["parameters"] for one in node["functions"]},
        at_least_one=bool(node.get("at_least_one")),
        stop_after_first=bool(node.get("stop_after_first")),
    )


_FORMATS: dict[str, Callable[[LarkRules, Mapping[str, Any], str], str]] = {
    "const_string": lambda lark, node, path: literal(node["value"]),
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
