"""The node's OpenAPI 3.1 document, generated from the structs that check requests."""

from __future__ import annotations

from prfaas.contracts.openai import ErrorBody, Usage
from prfaas.contracts.trace_api import TRACE_ID_PATTERN, TRACES_PATH, ProcessSpans
from prfaas.node.request_schema import ChatOptions, Completion
from prfaas.service.openapi import (
    EVENT,
    EVENTS,
    JSON,
    OBJECT,
    TEXT,
    ApiDocument,
    Content,
    parameter,
)
from prfaas.service.probes import PROBE_PATHS
from prfaas.text import Chat
from prfaas.text.tokenization import (
    Detokenize,
    DetokenizeAnswer,
    TokenizeAnswer,
    TokenizeOptions,
    TokenizePrompt,
)

# Probes have no key, and this document has no state.
OPEN_PATHS = PROBE_PATHS | {"/health", "/openapi.json"}
_REASONS = {
    400: "The request is invalid; the message names the field.",
    401: "The member key is missing or not valid.",
    404: "This node serves another model, or the id is not a trace id.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    424: "This host does not have the state of the transfer.",
    500: "The engine failed.",
    503: "The node is full or stops (the response has Retry-After), or its kvd does not answer.",
}
_READING = (400, 408, 413, 503)  # of every request with a body


def openapi(*, with_keys: bool) -> bytes:
    """`with_keys`: the node has a member key."""
    texts = (TokenizeOptions, TokenizePrompt, TokenizeAnswer, Detokenize, DetokenizeAnswer)
    kinds = (Completion, ChatOptions, Chat, Usage, ProcessSpans, *texts)
    document = ApiDocument("prfaas node", kinds, ErrorBody, _REASONS)
    keyed = (401,) if with_keys else ()
    answer = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": OBJECT, "minItems": 1},
            "usage": document.ref(Usage),
            "kv_transfer_params": {"type": ["object", "null"]},
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }
    generated: Content = {JSON: answer, EVENTS: EVENT}
    failures = (*keyed, *_READING, 404, 424, 500)
    chat = {"allOf": [document.ref(ChatOptions), document.ref(Chat)]}
    document.add(
        "post",
        "/v1/completions",
        "Complete a prompt, or one half of a hand-off (kv_transfer_params).",
        generated,
        body=document.ref(Completion),
        errors=failures,
    )
    document.add(
        "post",
        "/v1/chat/completions",
        "Continue a conversation.",
        generated,
        body=chat,
        errors=failures,
    )
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    rendered = {
        "type": "object",
        "properties": {"token_ids": ids, "sampling_params": OBJECT, "model": {"type": "string"}},
        "required": ["request_id", "token_ids", "sampling_params", "model"],
    }
    document.add(
        "post",
        "/v1/completions/render",
        "Check a completion without computing it.",
        {JSON: {"type": "array", "items": rendered, "minItems": 1}},
        body=document.ref(Completion),
        errors=(*keyed, *_READING, 404),
    )
    document.add(
        "post",
        "/v1/chat/completions/render",
        "Check a chat without computing it.",
        {JSON: rendered},
        body=chat,
        errors=(*keyed, *_READING, 404),
    )
    conversation = {"allOf": [document.ref(TokenizeOptions), document.ref(Chat)]}
    document.add(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation.",
        {JSON: document.ref(TokenizeAnswer)},
        body={"anyOf": [document.ref(TokenizePrompt), conversation]},
        errors=(*keyed, *_READING, 404),
    )
    document.add(
        "post",
        "/detokenize",
        "The text of token ids.",
        {JSON: document.ref(DetokenizeAnswer)},
        body=document.ref(Detokenize),
        errors=(*keyed, *_READING, 404),
    )
    models = {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": OBJECT}},
        "required": ["object", "data"],
    }
    document.add("get", "/v1/models", "The model that is served.", {JSON: models}, errors=keyed)
    trace_id = {"type": "string", "pattern": f"^{TRACE_ID_PATTERN}$"}
    document.add(
        "get",
        f"{TRACES_PATH}{{trace_id}}",
        "The spans of a trace that this node still has.",
        {JSON: document.ref(ProcessSpans)},
        errors=(*keyed, 404),
        parameters=[parameter("trace_id", trace_id, where="path")],
    )
    document.add("get", "/version", "Version of the node.", {JSON: OBJECT}, errors=keyed)
    document.add(
        "get",
        "/metrics",
        "Prometheus metrics; the metrics key opens it, too.",
        {TEXT: {"type": "string"}},
        errors=keyed,
    )
    document.add_common(health={})
    return document.encode(with_keys=with_keys, open_paths=OPEN_PATHS)
