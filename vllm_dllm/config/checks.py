"""Checks that several kinds of settings share."""

import reprlib
from typing import Any

MOST = 1 << 30
"""The largest count of anything: in 32 bits, with room for sums."""


def check_count(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer from 1 to MOST."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise ValueError(f"{key} must be an integer >= 1 and <= {MOST}, got {reprlib.repr(value)}.")


def check_boolean(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}.")
