"""Settings and request keys are declared by types, and errors say in one line what is wrong."""

import difflib
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

MOST = 1 << 30
"""The largest count of anything: in 32 bits, with room for sums."""

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(cls: type[Class]) -> type[Class]:
    """Decorates a class of settings, whose fields are checked whenever one is made."""
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    return made


Boolean = Annotated[bool, Strict()]
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict()]  # an integer, too
Count = Annotated[Integer, Ge(1), Le(MOST)]
PathName = Annotated[
    str, Strict(), StringConstraints(min_length=1, pattern=r"^[^\x00]*$"), "a path, a string"
]
"""A text in a type's metadata completes "must be"; other types are described by their bounds."""


def read(cls: type[Class], values: Any, place: str = "", remedy: str = "") -> Class:
    """An instance of `cls`, a class of settings, with these values.

    Args:
        values: as JSON has them, an object of the settings' names.
        place: what comes before a name in errors.
        remedy: a sentence that ends them.

    Raises:
        ValueError: one line that names the setting, what was expected and what came.
    """
    if not isinstance(values, Mapping):
        name = place.rstrip(". ") or "settings"
        raise ValueError(f"{name} must be {_expected(cls)}, got {reprlib.repr(values)}.{remedy}")
    try:
        return cls(**values)
    except ValidationError as error:
        raise ValueError(_complaint(error, cls, values, place) + remedy) from None


def unknown(name: str, known: Iterable[str], place: str = "", shown: str = "") -> str:
    """What to say of a name that is none of `known`, with the nearest of them. `place` comes before
    each; `shown` is the name as the user wrote it, where that is not `place` and `name`."""
    names, came = sorted(known), shown or f"{place}{name}"
    if near := nearest(name, names):
        return f"{came} is not known. Did you mean {place}{near}?"
    return f"{came} is not known. Known are: {', '.join(place + one for one in names)}."


def nearest(name: str, known: Iterable[str], likeness: float = 0.65) -> str | None:
    """The name that may be meant, whatever its case; None if none is like it."""
    by_plain = {plain(one): one for one in known}
    near = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=likeness)
    return by_plain[near[0]] if near else None


def plain(name: str) -> str:
    """Returns the form in which names are compared."""
    return name.lower().replace("-", "_")


def _complaint(error: ValidationError, cls: type, values: Mapping[str, Any], place: str) -> str:
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
                return unknown(str(step), types, place + "".join(f"{name}." for name in names))
            kind = types[str(step)]
        elif get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        else:  # an entry of a list, or one of several types: the whole is told
            break
        names.append(str(step))
        found = found.get(step) if isinstance(found, Mapping) else first["input"]
    name = place + ".".join(names)
    if first["type"] == "missing":
        return f"{name} is missing. It must be {_expected(kind)}."
    return f"{name} must be {_expected(kind)}, got {reprlib.repr(found)}."


def _expected(kind: Any) -> str:
    """What completes "must be"."""
    origin, args = get_origin(kind), get_args(kind)
    if is_pydantic_dataclass(kind):
        return f"an object with the keys {sorted(get_type_hints(kind))}"
    if origin is Literal:
        return f"one of {list(args)}"
    if origin is tuple:
        return f"a list, each {_expected(args[0])}"
    if origin is Annotated:
        if said := [text for text in kind.__metadata__ if isinstance(text, str)]:
            return said[0]
        return _expected(args[0]) + _bounds(kind.__metadata__, "g" if args[0] is float else "d")
    if type(None) in args:
        return _expected(next(one for one in args if one is not type(None)))
    return {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "an object")


def _bounds(metadata: Iterable[Any], form: str) -> str:
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
