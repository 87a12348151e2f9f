"""Strategies for values that match a JSON schema of the OpenAPI document, and for values that
nearly match it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SCALARS: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


class Schemas:
    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def body_of(self, path: str) -> dict[str, Any]:
        posted = self.document["paths"][path]["post"]
        schema: dict[str, Any] = posted["requestBody"]["content"]["application/json"]["schema"]
        return schema

    def documented(self, path: str) -> set[int]:
        return {int(code) for code in self.document["paths"][path]["post"]["responses"]}

    def values(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return st.deferred(lambda: self.values(self._resolved(schema)))
        if "anyOf" in schema:
            return st.one_of([self.values(option) for option in schema["anyOf"]])
        if "allOf" in schema:
            return self._objects([self._resolved(part) for part in schema["allOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        match schema.get("type"):
            case "null":
                return st.none()
            case "boolean":
                return st.booleans()
            case "integer":
                return st.integers(schema.get("minimum"), schema.get("maximum"))
            case "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum"))
                return st.floats(
                    low,
                    schema.get("maximum"),
                    exclude_min="exclusiveMinimum" in schema,
                    allow_nan=False,
                    allow_infinity=False,
                )
            case "string":
                return st.text(min_size=schema.get("minLength", 0), max_size=20)
            case "array":
                items = self.values(schema.get("items", {}))
                return st.lists(items, min_size=schema.get("minItems", 0), max_size=4)
            case "object":
                return self._objects([schema])
            case _:
                return ANYTHING

    def nearly(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Values that match the schema but for one field."""

        def with_other_value(value: dict[str, Any]) -> st.SearchStrategy[Any]:
            names = st.sampled_from(sorted(value) or ["prompt"])
            return st.builds(lambda name, other: {**value, name: other}, names, ANYTHING)

        return self.values(schema).flatmap(with_other_value)

    def _objects(self, schemas: list[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        needed: dict[str, Any] = {}
        optional: dict[str, Any] = {}
        for schema in schemas:
            for name, field in schema.get("properties", {}).items():
                place = needed if name in schema.get("required", ()) else optional
                place[name] = self.values(field)
        if not needed and not optional:
            return st.dictionaries(st.text(max_size=6), ANYTHING, max_size=3)
        return st.fixed_dictionaries(needed, optional=optional)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return schema
        found: dict[str, Any] = self.document["components"]["schemas"][
            schema["$ref"].rsplit("/", 1)[-1]
        ]
        return found
