"""Which keys the JSON schema of a call's arguments may have, and of which form their values are."""

from collections.abc import Callable
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keys whose values are maps from names, which may look like keys, to schemas."""
NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$comment", "$schema", "$id", "$defs", "definitions", "nullable", "strict"),
}
"""Keys that do not restrict a value."""
_REFUSED = {
    *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
    *("patternProperties", "propertyNames", "uniqueItems", "contains", "minContains"),
    *("maxContains", "additionalItems", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("properties", "$defs", "definitions"), ("an object", lambda value: isinstance(value, dict))
    ),
    **dict.fromkeys(("enum", "prefixItems"), ("a list", lambda value: isinstance(value, list))),
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf"), ("a list of schemas", lambda value: isinstance(value, list))
    ),
    **dict.fromkeys(("$ref", "pattern", "format"), ("text", lambda value: isinstance(value, str))),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
        ("a whole number from 0 on", lambda value: type(value) is int and value >= 0),
    ),
    "required": ("a list of texts", _are_texts),
    "type": ("text or a list of texts", lambda value: isinstance(value, str) or _are_texts(value)),
    "unevaluatedProperties": ("false", lambda value: value is False),
}


class SchemaError(ValueError):
    """A schema that cannot be used; the message says where, and why."""


def check_keys(schema: dict[str, Any], path: str) -> None:
    """Raises SchemaError if a key is not supported, or its value has the wrong type."""
    for key, value in schema.items():
        if key in _EXPECTED and not _EXPECTED[key][1](value):
            raise SchemaError(f"{path}/{key} must be {_EXPECTED[key][0]}, got {value!r}")
        if key in _REFUSED and value is not False:
            raise SchemaError(f"{path}/{key} is not supported in the arguments of calls")
