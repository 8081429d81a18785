"""Compares names of settings and keys: which known one is meant by a name that is not known."""

import difflib
from collections.abc import Iterable


def describe_unknown_name(name: str, known: Iterable[str], place: str = "", shown: str = "") -> str:
    """Returns the message about a name that is not in `known`, with the nearest one that is.
    `place`: prefix of each name; `shown`: the name as the user wrote it, if not `place` and
    `name`."""
    names, came = sorted(known), shown or f"{place}{name}"
    if near := nearest_name(name, names):
        return f"{came} is not known. Did you mean {place}{near}?"
    return f"{came} is not known. Known are: {', '.join(place + one for one in names)}."


def nearest_name(name: str, known: Iterable[str], likeness: float = 0.65) -> str | None:
    """Returns the name in `known` that is most like `name`, whatever its case; None if none is like
    it."""
    by_plain = {normalize_name(one): one for one in known}
    near = difflib.get_close_matches(normalize_name(name), by_plain, n=1, cutoff=likeness)
    return by_plain[near[0]] if near else None


def normalize_name(name: str) -> str:
    """Returns `name` in the form in which names are compared."""
    return name.lower().replace("-", "_")
