"""What the formats of JSON schema stand for, so that Python reads them: by `fromisoformat` of its
dates and times, by `uuid` and by `ipaddress`.

llguidance's have years from 0, leap seconds, the 29th of any February and a small `t` and `z`.
"""

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
"""Regular expressions of the whole text."""
