"""The API's OpenAPI 3.1 document, generated from the structs that check requests."""

from __future__ import annotations

from typing import Any

import msgspec

from prfaas import __version__
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.contracts.openai import ErrorBody, Usage
from prfaas.gateway.api.request_schema import ChatOptions, CompletionOptions, Prompt
from prfaas.text import Chat

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_REASONS = {
    "400": "The request is invalid; the message names the field.",
    "401": "The key is missing or not valid.",
    "403": "The path is closed, or the kvd is not a member.",
    "404": "The model or path does not exist.",
    "408": "The request body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests in flight; retry after Retry-After.",
    "500": "Internal gateway error.",
    "502": "The decode engine was lost.",
    "503": "No node can serve the request now; retry after Retry-After.",
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
        described: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": "Success.", "content": answers["content"]}}
            | {code: {"description": _REASONS[code], "content": failed} for code in errors},
        }
        if body is not None:
            described["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
        return described

    def json(schema: dict[str, Any]) -> dict[str, Any]:
        return {_JSON: {"schema": schema}}

    generated = {**json(answer), _EVENTS: {"schema": {"type": "string"}}}
    every = tuple(_REASONS)
    keyed = ("401",) if with_keys else ()
    operators = ("401", "403") if with_keys else ()
    paths = {
        "/v1/completions": {
            "post": operation("Complete a prompt.", every, completion, content=generated)
        },
        "/v1/chat/completions": {
            "post": operation("Continue a conversation.", every, chatting, content=generated)
        },
        "/v1/models": {
            "get": operation("List the model that is served.", keyed, content=json(anything))
        },
        "/v1/models/{model}": {
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "get": operation("Describe one model.", (*keyed, "404"), content=json(anything)),
        },
        "/health": {"get": operation("Liveness of the gateway.", content=json(anything))},
        "/metrics": {
            "get": operation(
                "Prometheus metrics. Needs the operator key.",
                operators,
                content={_TEXT: {"schema": {"type": "string"}}},
            )
        },
        "/openapi.json": {"get": operation("This document.", content=json(anything))},
        "/prfaas/v1/state": {
            "get": operation(
                "State of clusters, nodes, roles, queues and links. Needs the operator key.",
                operators,
                content=json(anything),
            )
        },
        "/prfaas/v1/plan": {
            "get": operation(
                "The current plan. Needs the operator key.", operators, content=json(anything)
            )
        },
        "/prfaas/v1/explain": {
            "post": operation(
                "Explain where this request of ?tenant= would be routed now. Needs the operator "
                "key.",
                every,
                {"anyOf": [completion, chatting]},
                content=json(anything),
            )
        },
        "/prfaas/v1/register": {
            "post": operation(
                "Heartbeat of a kvd. Needs the member key.",
                every,
                heartbeat,
                content=json(anything),
            )
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
