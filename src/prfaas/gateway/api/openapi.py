"""The published description of the API (OpenAPI 3.1), made from the very structs that check
requests, so that it is true."""

from __future__ import annotations

from typing import Any

import msgspec

from prfaas import __version__
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.gateway.api.error_responses import ErrorBody
from prfaas.gateway.api.request_schema import ChatOptions, CompletionOptions, Prompt
from prfaas.gateway.api.response_stream import Usage
from prfaas.text import Chat

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_REASONS = {
    "400": "The request is wrong; the message says where.",
    "401": "No API key, or one that is not known.",
    "404": "No such model, or path.",
    "408": "The request was not sent in time.",
    "413": "The body is too large.",
    "429": "Too many requests at once; come back after Retry-After.",
    "500": "The gateway failed.",
    "502": "The engine was lost.",
    "503": "Nothing can serve it now; come back after Retry-After.",
}


def openapi(*, with_keys: bool) -> bytes:
    kinds = (CompletionOptions, Prompt, ChatOptions, Chat, ErrorBody, Usage, Heartbeat)
    refs, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    completion_options, prompt, chat_options, chat, error, usage, heartbeat = refs
    completion = {"allOf": [completion_options, prompt]}
    chatting = {"allOf": [chat_options, chat]}
    answer = {
        "type": "object",
        "properties": {"id": {"type": "string"}, "choices": {"type": "array"}, "usage": usage},
        "required": ["choices"],
    }
    anything = {"type": "object"}

    def operation(
        summary: str,
        errors: tuple[str, ...] = (),
        body: dict[str, Any] | None = None,
        **answers: dict[str, Any],
    ) -> dict[str, Any]:
        failed = {_JSON: {"schema": error}}
        told: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": "Done.", "content": answers["content"]}}
            | {code: {"description": _REASONS[code], "content": failed} for code in errors},
        }
        if body is not None:
            told["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
        return told

    def json(schema: dict[str, Any]) -> dict[str, Any]:
        return {_JSON: {"schema": schema}}

    generated = {**json(answer), _EVENTS: {"schema": {"type": "string"}}}
    every = tuple(_REASONS)
    keyed = ("401",) if with_keys else ()
    paths = {
        "/v1/completions": {
            "post": operation("Complete a prompt.", every, completion, content=generated)
        },
        "/v1/chat/completions": {
            "post": operation("Continue a conversation.", every, chatting, content=generated)
        },
        "/v1/models": {"get": operation("What is served.", keyed, content=json(anything))},
        "/v1/models/{model}": {
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "get": operation("One of them.", (*keyed, "404"), content=json(anything)),
        },
        "/health": {"get": operation("Is it up?", content=json(anything))},
        "/metrics": {
            "get": operation("For Prometheus.", content={_TEXT: {"schema": {"type": "string"}}})
        },
        "/openapi.json": {"get": operation("This document.", content=json(anything))},
        "/prfaas/v1/state": {
            "get": operation(
                "Clusters, nodes, roles, queues, links.", keyed, content=json(anything)
            )
        },
        "/prfaas/v1/plan": {
            "get": operation("The plan that is followed.", keyed, content=json(anything))
        },
        "/prfaas/v1/explain": {
            "post": operation(
                "Where would this request go now, and why?",
                every,
                {"anyOf": [completion, chatting]},
                content=json(anything),
            )
        },
        "/prfaas/v1/register": {
            "post": operation("A kvd is there.", every, heartbeat, content=json(anything))
        },
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "prfaas gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return msgspec.json.encode(document)
