"""Error responses: OpenAI's error body, with the matching HTTP status."""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from prfaas.contracts.openai import Error, ErrorBody
from prfaas.errors import InputError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Characters: an error may quote the request, but not all of it.
MAX_MESSAGE = 1000
# Envoy does not retry a response with this header, whatever its status and the retry policy. The
# gateway has retried what can be retried, and another gateway has the same nodes: a retry would
# repeat the wait and the work, and a body that killed a worker here would kill one there.
_NO_PROXY_RETRY = "X-Envoy-RateLimited"
_RETRY_ELSEWHERE = frozenset({"shutting_down"})  # codes: another gateway can serve the request
_MAX_PARAM = 200


def error_body(error: RequestError) -> bytes:
    server = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, server)
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    param = error.param[:_MAX_PARAM] if error.param is not None else None
    return msgspec.json.encode(ErrorBody(Error(message, kind, param, error.code)))


def error_response(error: RequestError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if (error.status == 429 or error.status >= 500) and error.code not in _RETRY_ELSEWHERE:
        headers[_NO_PROXY_RETRY] = "true"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=error_body(error),
        status=error.status,
        headers=headers,
        content_type="application/json",
    )


def error_event(error: RequestError) -> bytes:
    """An error after the first token, when the status line has been sent already."""
    return b"data: " + error_body(error) + b"\n\n"


def bad_input(error: InputError) -> RequestError:
    problem = f"{error.problem}; {error.fix}" if error.fix else error.problem
    message = f"{error.where}: {problem}" if error.where else problem
    return RequestError(400, "invalid_request", message, param=error.where)


def of_http(error: web.HTTPException) -> RequestError:
    """A path or method that is not served."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    return RequestError(error.status, codes.get(error.status, "invalid_request"), error.reason)
