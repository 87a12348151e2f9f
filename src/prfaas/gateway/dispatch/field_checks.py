"""Checks whether the decode engine accepts the fields of a request, before anything is computed.

A `prfaas node` publishes the names of the fields that it accepts, and of vLLM they are known: vLLM
ignores other fields in silence. A request with another field is refused, offloaded or not.

Whether the engine accepts the values, it is asked. Otherwise an engine refuses them only after a
grant, a prefill on another node and a transfer. The engine's `render` path reads a request like the
path that generates, and computes nothing. An engine without this path (a vLLM without
`--enable-scale-out`) gets a trial request: the same fields with a short prompt and one token to
generate. Fields that an engine has accepted once are not asked about again, so that ordinary
traffic waits for no check.

A check may be what an engine does not survive, for example of a grammar. So it is a part of the
attempt: an engine that is lost over it is a lost engine (`attempts`). One that does not answer the
check in time, and answers everything else, is not lost: the attempt has failed.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from prfaas.contracts.openai_fields import (
    VLLM_STREAM_OPTIONS,
    Endpoint,
    known_fields,
    passed_to_vllm,
)
from prfaas.errors import PeerError, PeerHttpError, RequestError, ResponseLate
from prfaas.gateway.client.node_client import Card, NodeClient
from prfaas.gateway.client.request_body import JsonParts, encode_body
from prfaas.gateway.dispatch.handoff import AttemptFailed, raise_client_error, record_lost_engine
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.request import GatewayRequest
from prfaas.http_client.client import HttpClient
from prfaas.http_client.paced_writer import body_bytes
from prfaas.supervision import one_line

log = logging.getLogger(__name__)

# The gateway has checked these itself, and every engine accepts what it lets pass.
_CHECKED = frozenset(
    {"model", "max_tokens", "max_completion_tokens", "seed", "stream", "stream_options", "user"}
)
_CONVERSATION = frozenset({"messages", "documents"})
# Of a long conversation only the other fields are checked: the engine would tokenise all of it.
_LONGEST_CONVERSATION = 1 << 16
_SHORT_CONVERSATION = ({"role": "user", "content": "a"},)
_OF_THE_CONVERSATION = frozenset({"add_generation_prompt", "continue_final_message"})
# Of these a trial request keeps nothing: it generates one token, and does not stream.
_OF_THE_ANSWER = frozenset(
    {"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options"}
)
_TRIAL_CHOICES = 2  # at most: enough to learn whether several are allowed
_SHOWN_CHARS = 100  # of a field's name
TRIAL_S = 30.0  # a trial request waits in the engine's queue, and for the compilation of a grammar
_NO_SUCH_PATH = (403, 404, 405, 501)
MOST_REMEMBERED = 4_096  # combinations of an engine and fields


def check_names(card: Card, request: GatewayRequest) -> None:
    """Raises `RequestError` for a field that the engine would refuse or ignore."""
    endpoint: Endpoint = "completions" if request.path == "/v1/completions" else "chat"
    accepted = passed_to_vllm(endpoint) if card.serves is None else card.serves[endpoint]
    for name, value in request.fields.items():
        ignored = card.serves is None and _is_null(value) and name in known_fields(endpoint)
        if name not in accepted and not ignored:
            raise _unsupported(name)
    options = request.fields.get("stream_options")
    if not card.ours and isinstance(options, dict):
        for name, value in options.items():
            if name not in VLLM_STREAM_OPTIONS and value:
                raise _unsupported(f"stream_options.{name}")


def _unsupported(name: str) -> RequestError:
    shown = name[:_SHOWN_CHARS]
    return RequestError(
        400,
        "invalid_request",
        f"{shown}: the decode engine does not support the field; leave it out",
        param=shown,
    )


class FieldChecks:
    def __init__(self, fleet: Fleet, http: HttpClient) -> None:
        self._fleet = fleet
        self._http = http
        # By a digest of the engine's URL and the fields: the card of the engine that has accepted
        # them. An engine that was silent, and may be another one now, has another card.
        self._accepted: OrderedDict[bytes, Card] = OrderedDict()

    async def check(
        self,
        decode: Member,
        request: GatewayRequest,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> bool:
        """Whether the engine was asked, which may take long, and has accepted: it is not asked
        again. `meanwhile` is entered while it is asked. Raises `RequestError` when the engine
        refuses the request, and `AttemptFailed` when it does not answer."""
        url, card = decode.engine_url, decode.card
        if url is None or card is None:
            return False  # the attempt fails by itself
        fields = {n: value for n, value in request.fields.items() if not _is_checked(n, value)}
        if not fields.keys() - _CONVERSATION:
            return False
        asked = _digest(url, request.path, fields)
        if self._accepted.get(asked) is card:
            return False
        try:
            with meanwhile():
                await self._ask(NodeClient(self._http, url, self._fleet.timeouts), card, request)
        except PeerError as error:
            raise_client_error(error)
            if decode.node is None:
                raise AttemptFailed(str(error), unsent=True) from None  # its kvd has left
            if isinstance(error, ResponseLate):
                why = f"whether the engine accepts the request's fields is not known: {error}"
                raise AttemptFailed(why, decode.node, late=True) from None
            lost = record_lost_engine(self._fleet, decode.node, error)
            if lost.unsent or lost.broke:
                # An engine that was not asked has cost no attempt, such as one that restarts. One
                # that was asked, and does not answer, may have been lost by what the fields have.
                raise AttemptFailed(
                    str(error),
                    decode.node,
                    unsent=lost.unsent,
                    lost=lost.if_broke,
                    engine=None if lost.unsent else decode.node,
                ) from None
            # The decode call itself will show whether the engine can serve the request.
            problem = one_line(str(error))
            log.warning("%s: the fields of a request were not checked: %s", url, problem)
            return False
        self._remember(asked, card)
        return True

    async def _ask(self, node: NodeClient, card: Card, request: GatewayRequest) -> None:
        without_path = _digest(node.url, "", {})
        if self._accepted.get(without_path) is not card:
            body = _short_request(request) | {"model": card.model}
            try:
                limit_s = self._fleet.timeouts.node_poll_timeout_s
                path = f"{request.path}/render"
                await node.check(path, encode_body(body), request.headers, limit_s)
                return
            except PeerHttpError as error:
                if error.status not in _NO_SUCH_PATH:
                    raise
            self._remember(without_path, card)
        body = _trial_request(request) | {"model": card.model}
        await node.check(request.path, encode_body(body), request.headers, TRIAL_S)

    def _remember(self, digest: bytes, card: Card) -> None:
        self._accepted[digest] = card
        self._accepted.move_to_end(digest)
        if len(self._accepted) > MOST_REMEMBERED:
            self._accepted.popitem(last=False)


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, msgspec.Raw) and bytes(value) == b"null")


def _is_checked(name: str, value: object) -> bool:
    """Of the stream's options the gateway has checked only the one that it sets itself."""
    if name == "stream_options" and isinstance(value, dict) and len(value) > 1:
        return False
    return name in _CHECKED


def _short_request(request: GatewayRequest) -> dict[str, Any]:
    """The request with a short prompt. A long conversation becomes a short one."""
    fields = dict(request.fields)
    if request.path == "/v1/completions":
        return {**fields, "prompt": [int(request.token_ids.array[0])]}
    spoken = {name: fields[name] for name in _CONVERSATION & fields.keys()}
    if body_bytes(encode_body(spoken)) <= _LONGEST_CONVERSATION:
        return fields
    return _without_conversation(fields)


def _trial_request(request: GatewayRequest) -> dict[str, Any]:
    fields = {n: value for n, value in request.fields.items() if n not in _OF_THE_ANSWER}
    if request.path == "/v1/completions":
        fields["prompt"] = [int(request.token_ids.array[0])]
    else:
        fields = _without_conversation(fields)
    if request.n > _TRIAL_CHOICES:
        fields["n"] = _TRIAL_CHOICES
    return {**fields, "max_tokens": 1, "stream": False}


def _without_conversation(fields: dict[str, Any]) -> dict[str, Any]:
    left_out = _CONVERSATION | _OF_THE_CONVERSATION
    others = {name: value for name, value in fields.items() if name not in left_out}
    return {**others, "messages": _SHORT_CONVERSATION}


def _digest(url: str, path: str, fields: dict[str, Any]) -> bytes:
    """Of everything but the conversation."""
    digest = hashlib.sha256()
    named = [
        (n, bytes(v) if isinstance(v, JsonParts) else msgspec.json.encode(v))
        for n, v in fields.items()
        if n not in _CONVERSATION
    ]
    for part in (url.encode(), path.encode(), *(p for n, v in sorted(named) for p in (n, v))):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
