"""Checks that several kinds of settings share."""

from typing import Any


def check_count(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be an integer >= 1, got {value!r}.")


def check_boolean(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}.")
