r"""Mends the patterns of JSON schemas where llguidance reads them differently, and writes them as
regular expressions of Lark.

llguidance 1.7.6 lets `\\` and `\"` match any class that has all control characters, even if it
excludes backslashes and quotation marks: `"a\\b"` fits `^[^\\]*$`. A class that lacks a control
character means what it says, so NUL is excluded from each. llguidance's formats of times and email
addresses allow what Python's readers do not, so a pattern is added to them (`FORMATS`).
"""

import re
from typing import Any, Literal

from llguidance import LLMatcher, grammar_from, regex_to_lark

from vllm_dllm.grammar.schema_keys import MAPS, SchemaError

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_HOUR_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": rf"{_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))|[0-9]{2}(0[48]|[2468][048]|[13579][26])-02-29",
    "time": rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_.+-]{0,63}[A-Za-z0-9_+-]@([A-Za-z0-9-]{1,63}\.)+[A-Za-z0-9-]{0,62}"
    "[A-Za-z]",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
FORMATS["date-time"] = f"({FORMATS['date']})T{FORMATS['time']}"
"""Format of JSON schema -> regular expression of the whole text. Python reads what it allows: by
`fromisoformat` of dates and times, by `uuid`, by `ipaddress` and, of email addresses, by pydantic.
llguidance's own formats also allow the year 0, leap seconds, any 29 February, a small `t` and `z`,
and hosts of email that are an IP address or have no dot. Which dots and hyphens an email may have
is left to these: `grammar.completion` finds no end of a pattern that writes it out.
"""

_NARROWED = ("date", "time", "date-time", "email")
"""Formats for which llguidance allows more than `FORMATS`."""
_LONGEST_EMAIL = 254
_VALUE_KEYS = ("enum", "const", "default", "examples")
"""Keys whose values are no schemas."""
_NEGATED_CLASS = re.compile(
    r"\\.|\[\^((?:\\.|[^\]\\])+)\]|\[(?:\\.|[^\]\\])*\]"
    r"|\[.*",  # a class that never ends: looked for once, not from each of its brackets
    re.DOTALL,
)


def mend_patterns(schema: Any) -> Any:
    """Returns a copy of a JSON schema for llguidance. Its patterns and the formats in
    `_NARROWED` are changed so that llguidance reads them as JSON schema means them."""
    if isinstance(schema, list):
        return [mend_patterns(entry) for entry in schema]
    if not isinstance(schema, dict) or schema.get("type") == "gemma4_calls":
        return schema  # `gemma_calls.py` writes the schemas of calls without llguidance's JSON
    mended: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            mended[key] = mend_pattern(value)
        elif key in MAPS and isinstance(value, dict):
            mend = mend_pattern if key == "patternProperties" else str
            mended[key] = {mend(name): mend_patterns(of) for name, of in value.items()}
        else:
            mended[key] = value if key in _VALUE_KEYS else mend_patterns(value)
    if (name := mended.get("format")) in _NARROWED:
        others = mended.get("allOf")
        others = others if isinstance(others, list) else []
        longest = {"maxLength": _LONGEST_EMAIL} if name == "email" else {}
        mended["allOf"] = [*others, {"pattern": f"^({FORMATS[name]})$"} | longest]
    return mended


def mend_pattern(pattern: str) -> str:
    """Returns the pattern with NUL excluded from each negated class, such as `[^a]`."""
    return _NEGATED_CLASS.sub(_exclude_nul, pattern)


def _exclude_nul(match: re.Match[str]) -> str:
    """Returns the replacement for a match of `_NEGATED_CLASS`: the class without NUL. Escapes,
    plain classes and classes that were mended before stay as they are."""
    excluded = match.group(1)
    # No negated class but an escape, a plain class or an unclosed one; or one mended before.
    if excluded is None or excluded.startswith(r"\x00["):
        return match.group()
    inner = rf"\{excluded}" if excluded.startswith("^") else excluded
    return rf"[^\x00[{inner}]]"


def unanchored_lark_regex(pattern: str, path: str) -> str:
    """Returns a regular expression for Lark that matches every text in which JSON schema's
    `pattern` is found. Lark matches whole texts, so `.*` is added at each side where the pattern
    has no anchor. Raises SchemaError if llguidance cannot use the pattern, or an anchored pattern
    has outer alternatives; the message names `path`, the pattern's JSON pointer."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _has_outer_alternatives(inner):
        raise SchemaError(f"{path} must have its alternatives in parentheses, got {pattern!r}")
    check_alone("regex", inner, path)
    inner = regex_to_lark(inner)
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def check_alone(kind: Literal["regex", "json_schema"], spec: str, path: str) -> None:
    """Raises SchemaError, which names `path`, if llguidance cannot use a "regex" or a "json_schema"
    even alone. It would complain of the whole grammar, which the client has not written."""
    if complaint := LLMatcher.validate_grammar(grammar_from(kind, spec)):
        reason = complaint.partition("\n   1 |")[0].rpartition("error: ")[2]
        raise SchemaError(f"{path} cannot be used: {' '.join(reason.split())}")


def _has_outer_alternatives(pattern: str) -> bool:
    """Returns whether a pattern has a `|` outside of all parentheses and classes."""
    depth = 0
    for sign in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\[.*|.", pattern, re.DOTALL):
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False
