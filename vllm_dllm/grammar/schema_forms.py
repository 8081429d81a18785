"""Splits a JSON schema into forms, each of one type. Follows references, and multiplies out
combinations such as `anyOf`.

A form never allows a value that its schema does not allow. It may allow fewer: an object has only
the properties that the schema names.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_dllm.grammar.schema_keys import NOTES, SchemaError, check_keys

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
_MAX_FORMS = 1000
_MAX_SCHEMAS = 10_000
"""The most schemas inside of `root` that are split, each as often as it is referred to."""


class Form(NamedTuple):
    """The values of one type that a schema allows. An empty `schema` allows all of that type."""

    kind: str  # one of KINDS, "integer", or "values" of an enumeration
    schema: dict[str, Any]
    path: str  # JSON pointer, which errors name


class JsonSchema:
    """A whole JSON schema, `root`. Methods take a schema inside of `root` and its path, a JSON
    pointer that errors name."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._num_split = 0

    def forms(self, schema: Any, path: str) -> list[Form]:
        """Returns the forms of a schema: a value fits the schema if it fits one of its forms.
        Raises SchemaError if the schema allows no value or cannot be split."""
        alternatives = self._multiply_out(schema, path, ())
        forms = [form for one, place in alternatives for form in _split_by_type(one, place)]
        if not forms:
            raise SchemaError(f"{path} allows no value")
        return forms

    def reference(self, schema: Any) -> str | None:
        """Returns the `$ref` of a schema that restricts values by nothing else; None for others."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return schema["$ref"] if not (schema.keys() - NOTES - {"$ref"}) else None
        return None

    def union(self, schema: Any, path: str) -> list[tuple[Any, str]] | None:
        """Returns the alternatives of a schema and their paths, if the schema consists of `anyOf`,
        `oneOf` or an `allOf` of one schema. Returns None for other schemas. Raises SchemaError if
        the key's value has the wrong type, or a value could fit two alternatives of `oneOf`."""
        keys = schema.keys() - NOTES if isinstance(schema, dict) else set()
        if len(keys) != 1 or not keys <= {"anyOf", "oneOf", "allOf"}:
            return None
        (key,) = keys
        check_keys(schema, path)
        alternatives = [(one, f"{path}/{key}/{i}") for i, one in enumerate(schema[key])]
        if key == "oneOf":
            _check_one_of([[*self._multiply_out(*one, ())] for one in alternatives], path)
        if not alternatives or (key == "allOf" and len(alternatives) != 1):
            return None
        return alternatives

    def resolve(self, reference: str, path: str) -> Any:
        """Returns the schema that a `$ref` leads to. Raises SchemaError if it leads nowhere. `path`
        is that of the schema that has the `$ref`."""
        target = self.root
        first, *parts = reference.split("/")
        if first != "#":
            raise SchemaError(f"{path}/$ref must be '#' or begin with '#/', got {reference!r}")
        for part in parts:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or part not in target:
                raise SchemaError(f"{path}/$ref leads nowhere, got {reference!r}")
            target = target[part]
        return target

    def _multiply_out(
        self, schema: Any, path: str, followed: tuple[str, ...]
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields schemas without references and combinations, and their paths. A value that fits
        one of them fits `schema`. `followed` has the references that led to this schema. Raises
        SchemaError if a reference leads back to itself, or the schema cannot be split."""
        self._num_split += 1
        if self._num_split > _MAX_SCHEMAS:
            raise SchemaError(f"# must lead to at most {_MAX_SCHEMAS} schemas. Simplify it")
        if schema is False:
            return
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise SchemaError(f"{path} must be a JSON schema, got {schema!r}")
        check_keys(schema, path)
        own = {key: value for key, value in schema.items() if key not in {*NOTES, *_COMBINED}}
        factors: list[list[list[tuple[dict[str, Any], str]]]] = []
        if (reference := schema.get("$ref")) is not None:
            if reference in followed:
                raise SchemaError(f"{path}/$ref refers to itself, got {reference!r}")
            followed = (*followed, reference)
            referred = self.resolve(reference, path)
            factors.append([[*self._multiply_out(referred, f"{path}/$ref", followed)]])
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                ones = [
                    [*self._multiply_out(one, f"{path}/{key}/{i}", followed)]
                    for i, one in enumerate(schema[key])
                ]
                factors += [[one] for one in ones] if key == "allOf" else [ones]
                if key == "oneOf":
                    _check_one_of(ones, path)
        products = [(own, path)]
        for factor in factors:
            alternatives = [plain for one in factor for plain in one]
            _check_num_forms(len(products) * len(alternatives), path)
            products = [
                (_merge_schemas(before, plain, place), place)
                for before, _ in products
                for plain, place in alternatives
            ]
        yield from products


def _check_num_forms(count: int, path: str) -> None:
    """Raises SchemaError if a schema has more than `_MAX_FORMS` forms."""
    if count > _MAX_FORMS:
        raise SchemaError(f"{path} must have at most {_MAX_FORMS} forms. Simplify it")


def _check_one_of(alternatives: list[list[tuple[dict[str, Any], str]]], path: str) -> None:
    """Raises SchemaError unless it is certain that no value of a form fits two of the alternatives
    of `oneOf`, each multiplied out. `path` is that of the schema that has the `oneOf`."""
    _check_num_forms(sum(map(len, alternatives)), path)
    for i, ones in enumerate(alternatives):
        for others in alternatives[:i]:
            if not all(_are_disjoint(a, b) for a, _ in ones for b, _ in others):
                raise SchemaError(
                    f"{path}/oneOf must have alternatives that differ in their type, or in a "
                    "required property of one value. Use anyOf"
                )


def _are_disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Returns whether it is certain that no value of a form of one schema fits the other."""
    if _are_disjoint_enums(_enum_values(a), _enum_values(b)):
        return True
    of_forms = [
        {"number" if kind == "integer" else kind for kind in _possible_types(schema)}
        for schema in (a, b)
    ]
    # A schema without a type also allows values of the types that its keys are not about.
    of_schemas = [
        kinds if schema.keys() & {"type", "enum", "const"} else {*KINDS}
        for schema, kinds in zip((a, b), of_forms, strict=True)
    ]
    kinds = (of_forms[0] & of_schemas[1]) | (of_forms[1] & of_schemas[0])
    if kinds != {"object"}:
        return not kinds
    shared = {*a.get("required", ())} & {*b.get("required", ())}
    return any(
        _are_disjoint_enums(
            *(_enum_values(schema.get("properties", {}).get(name)) for schema in (a, b))
        )
        for name in shared
    )


def _split_by_type(schema: dict[str, Any], path: str) -> Iterator[Form]:
    """Yields the forms of a schema without combinations: one form for all enumerated values, or one
    for each type. Raises SchemaError if an enumeration has other keys beside it."""
    if (values := _enum_values(schema)) is not None:
        fitting = [value for value in values if _has_type(value, _listed_types(schema))]
        key = "const" if "const" in schema else "enum"
        if others := schema.keys() - {key, "type"}:
            raise SchemaError(f"{path}/{min(others)} is not supported beside {key}")
        if fitting:
            yield Form("values", {"enum": fitting}, path)
        return
    for kind in _possible_types(schema):
        yield Form(kind, {k: v for k, v in schema.items() if k != "type"}, path)


def _merge_schemas(a: dict[str, Any], b: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns a new schema for the values that fit both `a` and `b`. Raises SchemaError if their
    keys cannot be combined."""
    for named, rest in (("properties", "additionalProperties"), ("prefixItems", "items")):
        for key, other in ((named, rest), (rest, named)):
            if key in b and other in a and a.get(named) != b.get(named):
                raise SchemaError(f"{path}/{key} is not supported where another schema has {other}")
    merged = dict(a)
    for key, value in b.items():
        if key not in merged or merged[key] == value:
            merged[key] = value
        elif key == "required":
            merged[key] = [*merged[key], *(name for name in value if name not in merged[key])]
        elif key == "properties" and merged[key].keys().isdisjoint(value):
            merged[key] = {**merged[key], **value}
        elif key == "type":
            merged[key] = _common_types(_listed_types(a) or [], _listed_types(b) or [])
        else:
            raise SchemaError(f"{path}/{key} is not supported where another schema has it, too")
    return merged


def _enum_values(schema: Any) -> list[Any] | None:
    """Returns the values that a schema enumerates by `enum` or `const`; None if it has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")  # of a property, which is not checked before
    return values if isinstance(values, list) else None


def _are_disjoint_enums(values: list[Any] | None, others: list[Any] | None) -> bool:
    """Returns whether both arguments enumerate values, and have no value in common."""
    return (
        values is not None and others is not None and not any(value in others for value in values)
    )


def _listed_types(schema: dict[str, Any]) -> list[str] | None:
    """Returns the types that a schema lists under `type`; None if it has no `type`."""
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else kinds


def _possible_types(schema: dict[str, Any]) -> list[str]:
    """Returns the types that values of a schema may have: those of its enumerated values, else
    those under `type`, else those that its keys are about, else all."""
    if (values := _enum_values(schema)) is not None:
        return [kind for kind in KINDS if any(_has_type(value, [kind]) for value in values)]
    if (types := _listed_types(schema)) is not None:
        return types
    of_keys = dict.fromkeys(KIND_OF_KEY[key] for key in schema if key in KIND_OF_KEY)
    return list(of_keys) or list(KINDS)


def _common_types(a: list[str], b: list[str]) -> list[str]:
    """Returns the types that are in both lists. "number" and "integer" have "integer" in common."""
    common = [kind for kind in a if kind in b]
    if "integer" in {*a, *b} and all({*types} & {"integer", "number"} for types in (a, b)):
        common = [*(kind for kind in common if kind != "integer"), "integer"]
    return common


def _has_type(value: Any, types: list[str] | None) -> bool:
    """Returns whether a value has one of the types of JSON schema in `types`; None: any does."""
    if types is None:
        return True
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, (int, float)):
        return "number" in types or ("integer" in types and value % 1 == 0)
    names = {"str": "string", "list": "array", "dict": "object"}
    return names[type(value).__name__] in types
