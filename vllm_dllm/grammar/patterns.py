r"""Patterns of JSON schemas, as llguidance takes them.

llguidance 1.7.6 lets `\\` and `\"` stand for a character of any class that has all control
characters, even if it excludes backslashes and quotation marks: `"a\\b"` fits `^[^\\]*$`. A class
that lacks one of them means what it says, so none has NUL here. Its formats of times take what
Python's readers do not (`FORMATS`), so a pattern stands beside them.
"""

import re
from typing import Any

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_HOUR_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": rf"{_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))|[0-9]{2}(0[48]|[2468][048]|[13579][26])-02-29",
    "time": rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_.+-]*[A-Za-z0-9_+-]@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
FORMATS["date-time"] = f"({FORMATS['date']})T{FORMATS['time']}"
"""What the formats of JSON schema stand for, so that Python reads them: by `fromisoformat` of its
dates and times, by `uuid` and by `ipaddress`. Regular expressions of the whole text.

llguidance's have years from 0, leap seconds, the 29th of any February and a small `t` and `z`.
"""

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
