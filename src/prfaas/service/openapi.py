"""OpenAPI 3.1 documents, generated from the structs that check requests and encode responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from prfaas import __version__
from prfaas.service.probes import Liveness, Readiness

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
OBJECT: Mapping[str, Any] = {"type": "object"}
# Of one event of a stream: its data is JSON, or [DONE].
EVENT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
Schema: TypeAlias = Mapping[str, Any]
Content: TypeAlias = Mapping[str, Schema]  # schemas by media type


class ApiDocument:
    """The document of one service. `reasons`: what each error status means. Every error has the
    same body."""

    def __init__(
        self, title: str, kinds: Sequence[Any], error: type, reasons: Mapping[int, str]
    ) -> None:
        """`kinds`: the types that `ref` is called with."""
        everything = (*kinds, error, Liveness, Readiness)
        refs, self._components = msgspec.json.schema_components(
            everything, ref_template="#/components/schemas/{name}"
        )
        self._refs = list(zip(everything, refs, strict=True))
        self._error: Content = {JSON: self.ref(error)}
        self._reasons = reasons
        self._title = title
        self._paths: dict[str, dict[str, Any]] = {}

    def ref(self, kind: Any) -> Schema:
        return next(ref for known, ref in self._refs if known is kind)

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        answer: Content,
        *,
        body: Schema | None = None,
        body_required: bool = True,
        errors: Sequence[int] = (),
        others: Mapping[int, Schema] = MappingProxyType({}),
        parameters: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`others`: JSON responses with a status besides 200, which are not errors of this form."""
        responses = {"200": _response("Success.", answer)}
        for status in errors:
            responses[str(status)] = _response(self._reasons[status], self._error)
        for status, schema in others.items():
            responses[str(status)] = _response(self._reasons[status], {JSON: schema})
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        if parameters:
            operation["parameters"] = list(parameters)
        if body is not None:
            operation["requestBody"] = {
                "required": body_required,
                "content": {JSON: {"schema": body}},
            }
        self._paths.setdefault(path, {})[method] = operation

    def add_common(self, health: Content) -> None:
        """The paths that every service has and that need no key."""
        unready = self.ref(Readiness)
        self.add("get", "/live", "Whether the process runs.", {JSON: self.ref(Liveness)})
        self.add(
            "get",
            "/ready",
            "Whether requests should be sent here.",
            {JSON: unready},
            others={503: unready},
        )
        self.add("get", "/openapi.json", "This document.", {JSON: OBJECT})
        draining = (503,) if not health else ()
        self.add("get", "/health", "Health of the service.", health, errors=draining)

    def encode(self, *, with_keys: bool, open_paths: frozenset[str]) -> bytes:
        """`with_keys`: requests need a bearer token, except those to `open_paths`."""
        components: dict[str, Any] = {"schemas": self._components}
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": self._title, "version": __version__},
            "paths": self._paths,
            "components": components,
        }
        if with_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path in open_paths & self._paths.keys():
                for operation in self._paths[path].values():
                    operation["security"] = []
        return msgspec.json.encode(document)


def parameter(
    name: str, schema: Schema, *, where: str = "query", description: str = ""
) -> Mapping[str, Any]:
    found = {"name": name, "in": where, "schema": schema, "description": description}
    return {**found, "required": True} if where == "path" else found


def _response(description: str, content: Content) -> dict[str, Any]:
    response: dict[str, Any] = {"description": description}
    if content:
        response["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    return response
