"""A JSON schema taken apart: references followed, combinations multiplied out, so that each form of
a value can be written down by its type alone.

A form may allow fewer values than its schema, never others: objects get no properties but those
that are named.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

_NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$comment", "$schema", "$id", "$defs", "definitions", "nullable", "strict"),
}
"""Keys that say nothing of a value, or hold schemas that others refer to."""
_REFUSED = {
    *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
    *("patternProperties", "propertyNames", "uniqueItems", "contains", "minContains"),
    *("maxContains", "additionalItems", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
}
_EXPECTED: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), ("an object", (dict,))),
    **dict.fromkeys(("required", "enum", "prefixItems"), ("a list", (list,))),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), ("a list of schemas", (list,))),
    **dict.fromkeys(("$ref", "pattern", "format"), ("text", (str,))),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
        ("a whole number", (int,)),
    ),
    "type": ("text or a list", (str, list)),
}
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
KIND_OF_KEY = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"
    ),
}
KINDS = ("string", "number", "boolean", "null", "array", "object")
_MOST_FORMS = 1000


class SchemaError(ValueError):
    """A schema that cannot be used; says where, and why."""


class Form(NamedTuple):
    """One kind that a value may be of. An empty `schema` allows any value of that kind."""

    kind: str  # one of KINDS, "integer", or "values" of an enumeration
    schema: dict[str, Any]
    path: str


class Schemas:
    """The schemas inside of one, `root`, which its references are about."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def forms(self, schema: Any, path: str) -> list[Form]:
        """What a value may be."""
        plain = self._plain(schema, path, ())
        found = [form for one, place in plain for form in self._by_kind(one, place)]
        if not found:
            raise SchemaError(f"{path} allows no value")
        return found

    def reference(self, schema: Any) -> str | None:
        """Where `schema` refers to, if it does nothing else."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return schema["$ref"] if not (schema.keys() - _NOTES - {"$ref"}) else None
        return None

    def union(self, schema: Any, path: str) -> list[tuple[Any, str]] | None:
        """The schemas of which a value has to fit one, and their paths, if `schema` says nothing
        else."""
        asked = schema.keys() - _NOTES if isinstance(schema, dict) else set()
        if len(asked) != 1 or not asked <= {"anyOf", "oneOf", "allOf"}:
            return None
        (key,) = asked
        _check_keys(schema, path)
        alternatives = schema[key]
        if key == "oneOf":
            self._check_one_of(alternatives, f"{path}/{key}")
        if not alternatives or (key == "allOf" and len(alternatives) != 1):
            return None
        return [(one, f"{path}/{key}/{i}") for i, one in enumerate(alternatives)]

    def at(self, reference: str, path: str) -> Any:
        """The schema that a reference leads to. Raises SchemaError if it leads nowhere."""
        found = self.root
        if not reference.startswith("#"):
            raise SchemaError(f"{path}/$ref must begin with '#', got {reference!r}")
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise SchemaError(f"{path}/$ref leads nowhere, got {reference!r}")
            found = found[part]
        return found

    def _plain(
        self, schema: Any, path: str, followed: tuple[str, ...]
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """The schemas without references and combinations, one of which a value has to fit."""
        if schema is False:
            return
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise SchemaError(f"{path} must be a JSON schema, got {schema!r}")
        _check_keys(schema, path)
        own = {key: value for key, value in schema.items() if key not in {*_NOTES, *_COMBINED}}
        factors: list[list[tuple[Any, str]]] = []
        if (reference := schema.get("$ref")) is not None:
            if reference in followed:
                raise SchemaError(f"{path}/$ref refers to itself, got {reference!r}")
            followed = (*followed, reference)
            factors.append([(self.at(reference, path), f"{path}/$ref")])
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                ones = [(one, f"{path}/{key}/{i}") for i, one in enumerate(schema[key])]
                factors += [[one] for one in ones] if key == "allOf" else [ones]
        if "oneOf" in schema:
            self._check_one_of(schema["oneOf"], f"{path}/oneOf")
        found = [(own, path)]
        for factor in factors:
            alternatives = [
                plain for one, place in factor for plain in self._plain(one, place, followed)
            ]
            if len(found) * len(alternatives) > _MOST_FORMS:
                raise SchemaError(f"{path} must have at most {_MOST_FORMS} forms. Simplify it")
            found = [
                (_merged(before, plain, place), place)
                for before, _ in found
                for plain, place in alternatives
            ]
        yield from found

    def _check_one_of(self, alternatives: list[Any], path: str) -> None:
        """Checks that no value fits two of them."""
        plain = [
            [schema for schema, _ in self._plain(one, f"{path}/{i}", ())]
            for i, one in enumerate(alternatives)
        ]
        for i, ones in enumerate(plain):
            for others in plain[:i]:
                if not all(self._are_disjoint(a, b) for a in ones for b in others):
                    raise SchemaError(
                        f"{path} must have alternatives that differ in their type, or in a "
                        "required property of one value. Use anyOf"
                    )

    def _are_disjoint(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        """Whether it is certain that no value fits both schemas."""
        if _differ(_values(a), _values(b)):
            return True
        kinds = [{_wide(kind) for kind in _kinds(schema)} for schema in (a, b)]
        if kinds[0].isdisjoint(kinds[1]):
            return True
        if kinds != [{"object"}, {"object"}]:
            return False
        shared = {*a.get("required", ())} & {*b.get("required", ())}
        return any(
            _differ(*(_values(schema.get("properties", {}).get(name)) for schema in (a, b)))
            for name in shared
        )

    def _by_kind(self, schema: dict[str, Any], path: str) -> Iterator[Form]:
        """A schema without unions as forms: its values, or a form for each type."""
        if (values := _values(schema)) is not None:
            fitting = [value for value in values if _is_of(value, _types(schema))]
            if others := schema.keys() - {"enum", "const", "type"}:
                raise SchemaError(f"{path}/{min(others)} is not supported beside enum or const")
            if fitting:
                yield Form("values", {"enum": fitting}, path)
            return
        for kind in _kinds(schema):
            yield Form(kind, {k: v for k, v in schema.items() if k != "type"}, path)


def _check_keys(schema: dict[str, Any], path: str) -> None:
    """Raises SchemaError for a key whose value has another type, or that calls cannot keep."""
    for key, value in schema.items():
        name, types = _EXPECTED.get(key, ("", (object,)))
        if not isinstance(value, types) or (isinstance(value, bool) and int in types):
            raise SchemaError(f"{path}/{key} must be {name}, got {value!r}")
        if key in _REFUSED and value is not False:
            raise SchemaError(f"{path}/{key} is not supported in the arguments of calls")
    if schema.get("unevaluatedProperties", False) is not False:
        raise SchemaError(f"{path}/unevaluatedProperties must be false")


def _merged(a: dict[str, Any], b: dict[str, Any], path: str) -> dict[str, Any]:
    """What both ask for."""
    if "properties" in a and "properties" in b and ("additionalProperties" in {**a, **b}):
        raise SchemaError(
            f"{path}/additionalProperties is not supported where objects are combined"
        )
    found = dict(a)
    for key, value in b.items():
        if key not in found or found[key] == value:
            found[key] = value
        elif key == "required":
            found[key] = [*found[key], *(name for name in value if name not in found[key])]
        elif key == "properties" and found[key].keys().isdisjoint(value):
            found[key] = {**found[key], **value}
        elif key == "type":
            found[key] = _common(_types(a) or [], _types(b) or [])
        else:
            raise SchemaError(f"{path}/{key} is not supported where another schema has it, too")
    return found


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _differ(values: list[Any] | None, others: list[Any] | None) -> bool:
    """Whether both are enumerations, without a value in common."""
    return (
        values is not None and others is not None and not any(value in others for value in values)
    )


def _types(schema: dict[str, Any]) -> list[str] | None:
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else kinds


def _kinds(schema: dict[str, Any]) -> list[str]:
    """Returns the types of a schema; if it names none, those that its keys are about; if there are
    none, all."""
    if (values := _values(schema)) is not None:
        return [kind for kind in KINDS if any(_is_of(value, [kind]) for value in values)]
    if (types := _types(schema)) is not None:
        return types
    of_keys = dict.fromkeys(KIND_OF_KEY[key] for key in schema if key in KIND_OF_KEY)
    return list(of_keys) or list(KINDS)


def _wide(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _common(a: list[str], b: list[str]) -> list[str]:
    """The types that are in both."""
    found = [kind for kind in a if kind in b]
    if "integer" in {*a, *b} and all({*types} & {"integer", "number"} for types in (a, b)):
        found = [*(kind for kind in found if kind != "integer"), "integer"]
    return found


def _is_of(value: Any, types: list[str] | None) -> bool:
    """Whether a value is of one of these types of JSON schema; None: any."""
    if types is None:
        return True
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, (int, float)):
        return "number" in types or ("integer" in types and value == int(value))
    names = {"str": "string", "list": "array", "dict": "object"}
    return names[type(value).__name__] in types
