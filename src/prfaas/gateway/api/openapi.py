"""The gateway's OpenAPI 3.1 document, generated from the structs that check requests."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.contracts.gateway_api import (
    DRAIN_PATH,
    MAX_COUNT,
    REPORT_PATH,
    GatewayReport,
    SetDrain,
)
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.contracts.openai import MAX_PROMPTS, ErrorBody, Usage
from prfaas.contracts.trace_api import REQUESTS_PATH, FollowedRequest, KeptRequests
from prfaas.gateway.api.credentials import OPEN_PATHS
from prfaas.gateway.api.request_schema import ChatOptions, CompletionOptions, Ids, Prompt, Text
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
from prfaas.text import Chat
from prfaas.text.tokenization import (
    Detokenize,
    DetokenizeAnswer,
    TokenizeAnswer,
    TokenizeOptions,
    TokenizePrompt,
)

_REASONS = {
    400: "The request is invalid; the message names the field.",
    401: "The key is missing or not valid.",
    403: "The path is closed, or the kvd is not a member.",
    404: "The model, request or path does not exist, or the deployment has no other gateways.",
    408: "The request body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests in flight; retry after Retry-After.",
    500: "Internal gateway error.",
    502: "The decode engine was lost.",
    503: "No node can serve the request now (retry after Retry-After), or no request at all.",
}
_READING = (400, 408, 413, 503)  # of every request with a body


class _ListedPrompt(msgspec.Struct, frozen=True):
    """Each prompt is routed by itself. Choice j of prompt p has index p * n + j."""

    prompt: Annotated[list[Text | Ids], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


def openapi(*, with_keys: bool) -> bytes:
    """`with_keys`: requests of tenants and operators need a key."""
    texts = (TokenizeOptions, TokenizePrompt, TokenizeAnswer, Detokenize, DetokenizeAnswer)
    members = (Heartbeat, GatewayReport, SetDrain)
    answers = (Usage, KeptRequests, FollowedRequest)
    kinds = (
        CompletionOptions,
        Prompt,
        _ListedPrompt,
        ChatOptions,
        Chat,
        *answers,
        *members,
        *texts,
    )
    document = ApiDocument("prfaas gateway", kinds, ErrorBody, _REASONS)
    ref, add = document.ref, document.add
    prompt = {"anyOf": [ref(Prompt), ref(_ListedPrompt)]}
    completion = {"allOf": [ref(CompletionOptions), prompt]}
    chat = {"allOf": [ref(ChatOptions), ref(Chat)]}
    answer = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "choices": {"type": "array"},
            "usage": ref(Usage),
        },
        "required": ["choices"],
    }
    card = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "max_model_len": {"type": "integer"},
        },
        "required": ["id", "object", "created", "owned_by", "max_model_len"],
    }
    cards = {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": card}},
        "required": ["object", "data"],
    }
    generated: Content = {JSON: answer, EVENTS: EVENT}
    keyed = (401,) if with_keys else ()
    operators = (401, 403) if with_keys else ()
    failures = (*keyed, *_READING, 404, 429, 500, 502)
    for path, summary, body in (
        ("/v1/completions", "Complete a prompt.", completion),
        ("/v1/chat/completions", "Continue a conversation.", chat),
    ):
        add("post", path, summary, generated, body=body, errors=failures)
    conversation = {"allOf": [ref(TokenizeOptions), ref(Chat)]}
    add(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation.",
        {JSON: ref(TokenizeAnswer)},
        body={"anyOf": [ref(TokenizePrompt), conversation]},
        errors=(*keyed, *_READING, 404, 429),
    )
    add(
        "post",
        "/detokenize",
        "The text of token ids.",
        {JSON: ref(DetokenizeAnswer)},
        body=ref(Detokenize),
        errors=(*keyed, *_READING, 404, 429),
    )
    add("get", "/v1/models", "List the model that is served.", {JSON: cards}, errors=keyed)
    add(
        "get",
        "/v1/models/{model}",
        "Describe one model.",
        {JSON: card},
        errors=(*keyed, 404),
        parameters=[parameter("model", {"type": "string", "minLength": 1}, where="path")],
    )
    for path, summary, content in (
        ("/metrics", "Prometheus metrics.", {TEXT: {"type": "string"}}),
        ("/prfaas/v1/state", "State of clusters, nodes, roles, queues and links.", {JSON: OBJECT}),
        ("/prfaas/v1/plan", "The current plan.", {JSON: OBJECT}),
    ):
        add("get", path, f"{summary} Needs the operator key.", content, errors=operators)
    add(
        "get",
        REQUESTS_PATH,
        "The latest, the slowest and the failed requests. Needs the operator key.",
        {JSON: ref(KeptRequests)},
        errors=operators,
    )
    add(
        "get",
        f"{REQUESTS_PATH}/{{id}}",
        "One request, by its id or its trace id: its spans in every process that has served it, "
        "and the causes of its time to first token. Needs the operator key.",
        {JSON: ref(FollowedRequest)},
        errors=(*operators, 404, 429),
        parameters=[parameter("id", {"type": "string", "minLength": 1}, where="path")],
    )
    add(
        "post",
        "/prfaas/v1/explain",
        "Explain where this request of ?tenant= would be routed now. Needs the operator key.",
        {JSON: OBJECT},
        body={"anyOf": [completion, chat]},
        errors=(*operators, *_READING, 404, 500),
        parameters=[parameter("tenant", {"type": "string"})],
    )
    add(
        "post",
        "/prfaas/v1/register",
        "Heartbeat of a kvd. Needs the member key.",
        {JSON: OBJECT},
        body=ref(Heartbeat),
        errors=(401, 403, *_READING, 500, 502),
    )
    add(
        "get",
        REPORT_PATH,
        "Report of this gateway to another one, with the lengths of its requests after number "
        "?after=. Needs the member key.",
        {JSON: ref(GatewayReport)},
        errors=(400, 401, 403, 404),
        parameters=[
            parameter(
                "after", {"type": "integer", "minimum": 0, "maximum": MAX_COUNT, "default": 0}
            )
        ],
    )
    add(
        "post",
        DRAIN_PATH,
        "Drain a cluster, which then gets no new requests, or end that. Needs the operator key.",
        {JSON: OBJECT},
        body=ref(SetDrain),
        errors=(*operators, *_READING),
    )
    document.add_common(health={JSON: OBJECT})
    return document.encode(with_keys=with_keys, open_paths=OPEN_PATHS)
