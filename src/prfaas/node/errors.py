"""The errors of a request, in OpenAI's error shape, each with a code.

A gateway decides by `code`: it re-issues a lost transfer on another node, retries an overload later
and returns a bad request to the client.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from prfaas.contracts.openai import Error, ErrorBody
from prfaas.errors import InputError, PeerError, RequestError
from prfaas.types import NotNow

Code: TypeAlias = Literal[
    "invalid_request",
    "unauthorized",
    "forbidden",
    "model_not_found",
    "not_found",  # a path that is not served
    "method_not_allowed",
    "body_too_large",
    "request_timeout",  # the body did not arrive in time
    "draining",  # this node takes no new work
    "overloaded",  # retry after Retry-After
    "transfer_lost",  # this host does not have the state to continue from
    "kvd_unavailable",  # the kvd does not answer, and a hand-off needs it
    "engine_failed",
    "internal_error",  # a defect of this node
]

_STATUS: dict[Code, int] = {
    "invalid_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "request_timeout": 408,
    "draining": 503,
    "overloaded": 503,
    "transfer_lost": 424,
    "kvd_unavailable": 503,
    "engine_failed": 500,
    "internal_error": 500,
}
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "BadRequestError",
    408: "BadRequestError",
    413: "BadRequestError",
    424: "FailedDependencyError",
}

MAX_MESSAGE = 900  # characters: a message may quote the request, but not all of it


def request_error(
    code: Code, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> RequestError:
    return RequestError(_STATUS[code], code, message, param=param, retry_after_s=retry_after_s)


def error_body(error: RequestError) -> ErrorBody:
    kind = _TYPES.get(error.status, "InternalServerError")
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    return ErrorBody(Error(message, kind, error.param, error.code))


def bad_input(error: InputError) -> RequestError:
    return request_error("invalid_request", str(error), param=error.where)


def not_now(refusal: NotNow) -> RequestError:
    return request_error("overloaded", refusal.reason, retry_after_s=refusal.retry_after_s)


def of_job(error: Exception) -> RequestError:
    """The RequestError for the error of an engine's job."""
    match error:
        case RequestError():
            return error
        case InputError():
            return bad_input(error)
        case PeerError():
            return request_error("kvd_unavailable", str(error))
        case _:
            return request_error("engine_failed", str(error))
