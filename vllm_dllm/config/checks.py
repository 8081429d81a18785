"""Checks settings and request keys against declared types, with errors of one line."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Strict, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

MAX_COUNT = 1 << 30
"""The largest count of anything: fits 32 bits, with room for sums."""

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(cls: type[Class]) -> type[Class]:
    """Decorates a class of settings: makes it a frozen dataclass whose constructor raises
    pydantic's ValidationError for unknown names and for values of other types than declared."""
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    return made


Boolean = Annotated[bool, Strict()]
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict()]  # takes integers, too
Count = Annotated[Integer, Ge(1), Le(MAX_COUNT)]
PathName = Annotated[
    str, Strict(), StringConstraints(min_length=1, pattern=r"^[^\x00]*$"), "a path, a string"
]
"""A path. A string in a type's metadata completes "must be" in errors, in place of bounds."""


def parse_settings(cls: type[Class], values: Any, place: str = "", remedy: str = "") -> Class:
    """Returns an instance of `cls`, a class decorated with `settings`.

    Args:
        values: the settings' values by name, as JSON has them.
        place: text before each name in errors.
        remedy: sentence at the end of errors.

    Raises:
        ValueError: one line that names the setting, what was expected and what came.
    """
    if not isinstance(values, Mapping):
        name = place.rstrip(". ") or "settings"
        raise ValueError(
            f"{name} must be {_describe_type(cls)}, got {reprlib.repr(values)}.{remedy}"
        )
    try:
        return cls(**values)
    except ValidationError as error:
        raise ValueError(_describe_error(error, cls, values, place) + remedy) from None


def _describe_error(
    error: ValidationError, cls: type, values: Mapping[str, Any], place: str
) -> str:
    """Returns pydantic's first error in one line: the setting's name after `place`, what was
    expected and what came. An error of a class' own check keeps its text."""
    first = error.errors(include_url=False)[0]
    if (own := first.get("ctx", {}).get("error")) is not None:  # a check of a class' own
        return str(own)
    names: list[str] = []
    kind: Any = cls
    found: Any = values
    for step in first["loc"]:
        if is_pydantic_dataclass(kind):
            types = get_type_hints(kind, include_extras=True)
            if step not in types:
                return describe_unknown_name(
                    str(step), types, place + "".join(f"{name}." for name in names)
                )
            kind = types[str(step)]
        elif get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        else:  # an entry of a list, or one of several types: the error shows the whole value
            break
        names.append(str(step))
        found = found.get(step) if isinstance(found, Mapping) else first["input"]
    name = place + ".".join(names)
    if first["type"] == "missing":
        return f"{name} is missing. It must be {_describe_type(kind)}."
    return f"{name} must be {_describe_type(kind)}, got {reprlib.repr(found)}."


def _describe_type(kind: Any) -> str:
    """Returns the text that completes "must be" for values of the type `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if is_pydantic_dataclass(kind):
        return f"an object with the keys {sorted(get_type_hints(kind))}"
    if origin is Literal:
        return f"one of {list(args)}"
    if origin is tuple:
        return f"a list, each {_describe_type(args[0])}"
    if origin is Annotated:
        if said := [text for text in kind.__metadata__ if isinstance(text, str)]:
            return said[0]
        return _describe_type(args[0]) + _describe_bounds(
            kind.__metadata__, "g" if args[0] is float else "d"
        )
    if type(None) in args:
        return _describe_type(next(one for one in args if one is not type(None)))
    return {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "an object")


def _describe_bounds(metadata: Iterable[Any], form: str) -> str:
    """Returns the bounds in a type's metadata as text that follows a noun, such as " >= 1 and <=
    8". Empty if there are none. `form`: how numbers are formatted."""
    found = []
    for bound in metadata:
        match bound:
            case Ge(ge=least):
                found.append(f">= {least:{form}}")
            case Gt(gt=below):
                found.append(f"> {below:{form}}")
            case Lt(lt=above):
                found.append(f"< {above:{form}}")
            case Le(le=most):
                found.append(f"<= {most:{form}}")
    return " " + " and ".join(found) if found else ""


def describe_unknown_name(name: str, known: Iterable[str], place: str = "", shown: str = "") -> str:
    """Returns the message about `name`, which is not in `known`: with the nearest known name or, if
    none is near, with all of them. `place`: text before each name. `shown`: the name as the user
    wrote it, if not `place` and `name`."""
    names, came = sorted(known), shown or f"{place}{name}"
    if near := nearest_name(name, names):
        return f"{came} is not known. Did you mean {place}{near}?"
    return f"{came} is not known. Known are: {', '.join(place + one for one in names)}."


def nearest_name(name: str, known: Iterable[str], likeness: float = 0.65) -> str | None:
    """Returns the name in `known` most like `name`, or None below `likeness` (0 to 1). Ignores case
    and how words are joined."""
    by_plain = {normalize_name(one): one for one in known}
    near = difflib.get_close_matches(normalize_name(name), by_plain, n=1, cutoff=likeness)
    return by_plain[near[0]] if near else None


def normalize_name(name: str) -> str:
    """Returns `name` as names are compared: in lower case, without spaces around it, and with
    underscores for hyphens and between the words of `camelCase`."""
    return re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().replace("-", "_")
