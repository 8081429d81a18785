r"""Patterns of JSON schemas, as llguidance takes them.

llguidance 1.7.6 lets `\\` and `\"` stand for a character of any class that has all control
characters, even if it excludes backslashes and quotation marks: `"a\\b"` fits `^[^\\]*$`. A class
that lacks one of them means what it says, so none has NUL here. Its formats of times take what
Python's readers do not (`formats.py`), so a pattern stands beside them.
"""

import re
from typing import Any

from vllm_dllm.grammar.formats import FORMATS

_TIMES = ("date", "time", "date-time")
_VALUES = ("enum", "const", "default", "examples")
"""What holds no schemas."""
_NEGATED_CLASS = re.compile(r"\\.|\[\^((?:\\.|[^\]\\])+)\]|\[(?:\\.|[^\]\\])*\]", re.DOTALL)


def mend_patterns(schema: Any) -> Any:
    """A copy of the schema whose patterns mean to llguidance what they say."""
    if isinstance(schema, list):
        return [mend_patterns(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = mend_pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            found[key] = {mend_pattern(name): mend_patterns(of) for name, of in value.items()}
        else:
            found[key] = value if key in _VALUES else mend_patterns(value)
    if (name := found.get("format")) in _TIMES:
        time = {"pattern": f"^({FORMATS[name]})$"}
        found["allOf"] = [*found["allOf"], time] if isinstance(found.get("allOf"), list) else [time]
    return found


def mend_pattern(pattern: str) -> str:
    """Excludes NUL from each class that excludes anything."""
    return _NEGATED_CLASS.sub(_without_nul, pattern)


def _without_nul(match: re.Match[str]) -> str:
    excluded = match.group(1)
    # An escape, or a class that names what it has, or one that was mended before.
    if excluded is None or excluded.startswith(r"\x00["):
        return match.group()
    inner = rf"\{excluded}" if excluded.startswith("^") else excluded
    return rf"[^\x00[{inner}]]"
