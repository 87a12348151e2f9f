"""Messages of the kvd's HTTP API: bodies and parameters of requests, responses, errors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from prfaas.contracts.kvd_api import LONGEST_WAIT_S, KvdErrorBody
from prfaas.errors import InputError, PeerError, PeerForbidden, RequestError
from prfaas.security.own_host import Refusal
from prfaas.service.request_body import BodyLimits, DamagedBody
from prfaas.types import Compat, TransferId

_LOG = logging.getLogger(__name__)
# Block hashes of a million tokens are under 3 MB, also in blocks of 16 tokens. They become as many
# small objects, and a part of the memory that the largest body takes for that stays.
MAX_BODY_BYTES = 8 << 20
MAX_BODIES_BYTES = 512 << 20  # of bodies that are being read
BODY_S = 60.0  # for a body to arrive
_SHOWN_CHARS = 100
_MESSAGE_CHARS = 2_000  # a message may quote the request, but not all of it
_INTEGER = re.compile("-?[0-9]{1,18}")
_NUMBER = re.compile("[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?")
# Besides its own errors msgspec raises these for invalid UTF-8 and for deeply nested values.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
T = TypeVar("T")


class RequestBodies:
    def __init__(self) -> None:
        self._limits = BodyLimits(
            each_bytes=MAX_BODY_BYTES, all_bytes=MAX_BODIES_BYTES, within_s=BODY_S
        )

    async def read(self, request: web.Request, kind: type[T]) -> T:
        """InputError when the body is not a `kind`; RequestError when it exceeds a limit."""
        async with self._limits.read(request) as data:
            try:
                return msgspec.json.decode(data or b"{}", type=kind)
            except _UNREADABLE as error:
                raise InputError(
                    f"the body is not a valid {kind.__name__}: {error}", where=request.path
                ) from None


@web.middleware
async def respond_to_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    headers = {}
    try:
        return await handler(request)
    except PeerForbidden as error:
        status, code, message = 403, "forbidden", str(error)
    except InputError as error:
        status, code, message = 400, "bad_request", str(error)
        if isinstance(error, DamagedBody):
            headers["Connection"] = "close"
    except RequestError as error:
        status, code, message = error.status, error.code, error.message
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    except PeerError as error:
        status, code, message = 502, "failed", str(error)
    except web.HTTPMethodNotAllowed as error:
        status, code, message = 405, "bad_request", f"{request.method[:20]} is not served here"
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    except web.HTTPNotFound:
        status, code, message = 404, "unknown", "this path is not served"
    except ConnectionError:
        return web.Response()  # the client has left: this response is not sent
    except Exception:
        _LOG.exception("%s %s", request.method, shown(request.path))
        status, code, message = 500, "failed", "this kvd failed; its log has the reason"
    response = json_response(KvdErrorBody(code, message[:_MESSAGE_CHARS]), status=status)
    response.headers.update(headers)
    return response


def number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if _INTEGER.fullmatch(text) is None:
        raise InputError(f"{shown(text)} is not a number", where=name, fix="give at most 18 digits")
    return int(text)


def wait_s(request: web.Request) -> float:
    """The parameter wait_s, within its limits."""
    text = request.query.get("wait_s", "0")
    if _NUMBER.fullmatch(text) is None:
        raise InputError(
            f"{shown(text)} is not a number of seconds", where="wait_s", fix="give seconds"
        )
    return min(max(0.0, float(text)), LONGEST_WAIT_S)


def shown(text: str) -> str:
    """Text of a request for a message: short, and without characters that UTF-8 cannot encode."""
    shortened = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return ascii(shortened)


def json_response(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, content_type="application/json", status=status)


def incompatible(differences: Sequence[str], formats: Iterable[Compat]) -> web.Response:
    """`formats`: of the pools of this kvd."""
    taken = " and ".join(f"the {one.form} form ({one.layout})" for one in formats)
    message = f"the engine does not match this kvd: {'; '.join(differences)}; it takes {taken}"
    return json_response(KvdErrorBody("incompatible", message, tuple(differences)), status=409)


def unauthorized() -> web.Response:
    problem = KvdErrorBody("unauthorized", "this kvd requires the member key as a bearer token")
    answer = json_response(problem, status=401)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def foreign(refusal: Refusal) -> web.Response:
    return json_response(KvdErrorBody("forbidden", refusal.message), status=403)


def unknown_transfer(transfer_id: TransferId) -> web.Response:
    message = f"transfer {shown(transfer_id)} is not known here"
    return json_response(KvdErrorBody("unknown", message), status=404)
