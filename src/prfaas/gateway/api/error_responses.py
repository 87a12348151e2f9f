"""How a client hears that it did not work: OpenAI's error shape, and the status that fits."""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from prfaas.contracts.openai import Error, ErrorBody
from prfaas.errors import InputError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MAX_MESSAGE = 1000  # characters: what a client sent may be quoted, but not all of it


def error_body(refusal: RequestError) -> bytes:
    server = "server_error" if refusal.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(refusal.status, server)
    message = refusal.message
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    return msgspec.json.encode(ErrorBody(Error(message, kind, refusal.param, refusal.code)))


def error_response(refusal: RequestError) -> web.Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=error_body(refusal),
        status=refusal.status,
        headers=headers,
        content_type="application/json",
    )


def error_event(refusal: RequestError) -> bytes:
    """Behind the first token: the status line has been sent already."""
    return b"data: " + error_body(refusal) + b"\n\n"


def bad_input(error: InputError) -> RequestError:
    said = f"{error.problem}; {error.fix}" if error.fix else error.problem
    message = f"{error.where}: {said}" if error.where else said
    return RequestError(400, "invalid_request", message, param=error.where)


def of_http(error: web.HTTPException) -> RequestError:
    """A path or method that is not served."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    return RequestError(error.status, codes.get(error.status, "invalid_request"), error.reason)
