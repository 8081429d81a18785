"""Compares names of settings and keys: which known one is meant by a name that is not known."""

import difflib
from collections.abc import Iterable


def describe_unknown_name(name: str, known: Iterable[str], place: str = "", shown: str = "") -> str:
    """Returns the message about `name`, which is not in `known`: with the nearest known name or, if
    none is near, with all of them. `place`: text before each name. `shown`: the name as the user
    wrote it, if not `place` and `name`."""
    names, came = sorted(known), shown or f"{place}{name}"
    if near := nearest_name(name, names):
        return f"{came} is not known. Did you mean {place}{near}?"
    return f"{came} is not known. Known are: {', '.join(place + one for one in names)}."


def nearest_name(name: str, known: Iterable[str], likeness: float = 0.65) -> str | None:
    """Returns the name in `known` that is most like `name`, whatever its case and hyphens. None if
    none reaches `likeness`, from 0 to 1."""
    by_plain = {normalize_name(one): one for one in known}
    near = difflib.get_close_matches(normalize_name(name), by_plain, n=1, cutoff=likeness)
    return by_plain[near[0]] if near else None


def normalize_name(name: str) -> str:
    """Returns `name` in lower case and with underscores for hyphens, as names are compared."""
    return name.lower().replace("-", "_")
