"""What fuzzed clients send: messages of valid sessions, most of them mutated. No sockets."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from prfaas.kvd.engine_socket.messages import LeaseTicket, Publish
from prfaas_lab.testing.hostile import (
    INTEGERS,
    as_json,
    as_msgpack,
    mutate,
    mutate_bytes,
    mutate_json,
    nested,
)
from tests.kvd.fuzz.sessions import Request, Sessions, http_bytes

MUTATED = 0.7  # the share of messages that are mutated; the others carry the sessions on
_LENGTH = struct.Struct("!I")
_NUMBERS = ("", "-1", "1e999", "nan", "inf", "-inf", "0x10", "1_0", "9" * 5_000, "\u0663", "\x00")
_PATHS = (
    "/v1/transfers/%ff",
    "/v1/transfers/\udcff",
    "/v1/transfers/" + "x" * 3_000,
    "/v1/transfers//abort",
    "/v1/transfers/%2e%2e/abort",
    "/v1/transfers/%F0%9F%98%80",
    "/v1/transfers/%00",
    "/v1/events?node=\udcff",
    "/v1/events?node=%ff&since=-1",
    "/v1/stats?check=%00",
    "http://other/v1/stats",
    "/v2",
    "*",
)
_HEADERS = (
    b"Connection: close\r\n",
    b"Content-Encoding: br\r\n",
    b"Content-Encoding: deflate\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 1\r\nContent-Length: 2\r\n",
    b"Content-Type: text/\xff; charset=nothing\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: x\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Upgrade: websocket\r\n",
    b"X: " + b"x" * 9_000 + b"\r\n",
    b"\xff: 1\r\n",
)
_METHODS = ("PUT", "DELETE", "OPTIONS", "POST", "GET", "PATCH", "TRACE", "x", "")


class Message(NamedTuple):
    data: bytes
    mutated: bool
    cut: bool = False  # the framing is broken: the client closes the connection after it
    prompt: Sequence[int] = ()  # of a valid `/v1/open`


class Traffic:
    def __init__(self, sessions: Sessions, rng: random.Random) -> None:
        self.sessions = sessions
        self._rng = rng
        self._number = 0

    # Engines --------------------------------------------------------------------------------------

    def register(self, engine_id: str) -> Message:
        return Message(self._framed(self.sessions.register(engine_id)), mutated=False)

    def mutated_register(self) -> Message:
        call = _plain(self.sessions.model.register("engine"))
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            call = self._mutate_call(call)
        return Message(self._framed(call), mutated=True)

    def call(self, leases: dict[int, LeaseTicket]) -> Message:
        rng = self._rng
        message = self.sessions.call(leases)
        if rng.random() >= MUTATED:
            return Message(self._framed(message), mutated=False)
        if isinstance(message, Publish):
            message = self._mutated_publish(message)
        chance = rng.random()
        if chance < 0.4:
            return Message(self._framed(self._misdirect(_plain(message))), mutated=True)
        if chance < 0.72:
            return Message(self._framed(self._mutate_call(_plain(message))), mutated=True)
        data = self._framed(message)
        if chance < 0.82:
            return Message(data * rng.choice((2, 2, 3)), mutated=True)
        if chance < 0.9:  # the body, with its right length
            body = mutate_bytes(data[_LENGTH.size :], rng)
            return Message(_LENGTH.pack(len(body)) + body, mutated=True)
        if chance < 0.95:
            return Message(mutate_bytes(data, rng), mutated=True, cut=True)
        return Message(data[: rng.randrange(len(data))], mutated=True, cut=True)

    def framed(self, call: msgspec.Struct, number: int) -> bytes:
        """As a client sends it."""
        body = as_msgpack([number, call])
        return _LENGTH.pack(len(body)) + body

    def _framed(self, call: Any) -> bytes:
        rng = self._rng
        self._number += 1
        number: Any = self._number if rng.random() < 0.95 else rng.choice((0, -1, 2**64 - 1, 7))
        if rng.random() < 0.01:
            number = mutate(number, rng)
        body = as_msgpack([number, call])
        return _LENGTH.pack(len(body)) + body

    def _mutate_call(self, call: Any) -> Any:
        """Mutates a field of the call; rarely the whole call."""
        rng = self._rng
        if not isinstance(call, dict):
            return mutate(call, rng)
        fields = [name for name in call if name != "type"]
        if not fields or rng.random() < 0.03:
            return mutate(call, rng)
        name = rng.choice(fields)
        return {**call, name: mutate(call[name], rng)}

    def _misdirect(self, call: dict[str, Any]) -> dict[str, Any]:
        """Keeps every type right: another lease, transfer, size or grant. Such calls get past the
        decoder."""
        rng, memory = self._rng, self.sessions.memory
        match call:
            case {"lease_id": int()}:
                near = [ticket.lease_id for ticket in memory.leases] or [1]
                call["lease_id"] = rng.choice((rng.choice(near), rng.choice(INTEGERS)))
                if "segments" in call and call["segments"]:
                    at = rng.randrange(len(call["segments"]))
                    segments = list(call["segments"])
                    segments[at] = _typed(segments[at], rng)
                    call["segments"] = segments
            case {"grant": dict() as grant}:
                name = rng.choice([name for name in grant if name != "type"])
                changed = {**grant, name: _typed(grant[name], rng)}
                if name == "skip_tokens":
                    group = rng.choice(self.sessions.model.spec.groups).name
                    changed[name] = {**grant[name], group: rng.choice((*INTEGERS, 4, 8))}
                call["grant"] = changed
            case {"hashes": list() | tuple() as hashes} if hashes:
                repeated = list(hashes)
                repeated[rng.randrange(len(hashes))] = rng.choice(repeated)
                call["hashes"] = repeated
                if "tokens" in call and rng.random() < 0.3:
                    call["tokens"] = _typed(call["tokens"], rng)
            case {"type": str()}:
                fields = [name for name in call if name != "type"]
                if fields:
                    name = rng.choice(fields)
                    call[name] = _typed(call[name], rng)
        return call

    def _mutated_publish(self, message: Publish) -> Publish:
        rng = self._rng
        event: Any = self.sessions.engine_event()
        for _ in range(rng.choice((1, 1, 2))):
            event = _typed(event, rng) if rng.random() < 0.5 else mutate(event, rng)
        payload = as_msgpack([0.0, [event, self.sessions.engine_event()], 0])
        if rng.random() < 0.1:
            payload = mutate_bytes(payload, rng)
        elif rng.random() < 0.02:
            payload = as_msgpack(nested(rng.choice((500, 5_000))))
        names = dict(message.group_names)
        if rng.random() < 0.3:
            names[rng.choice(INTEGERS)] = rng.choice(("full0", "", "x" * 300))
        return Publish(payload, names, message.block_tokens)

    # Gateways and other kvds ----------------------------------------------------------------------

    def request(self) -> Message:
        rng = self._rng
        request = self.sessions.request()
        body = None if request.body is None else msgspec.json.encode(request.body)
        if rng.random() >= MUTATED:
            return Message(http_bytes(request, body), False, prompt=request.prompt)
        if rng.random() < 0.15:
            return self._broken_http(request, body)
        if body is None or rng.random() < 0.1:
            return Message(http_bytes(self._mutate_target(request), body), True)
        chance = rng.random()
        plain = msgspec.json.decode(body)
        body = as_json(_typed(plain, rng)) if chance < 0.4 else mutate_json(plain, rng)
        return Message(http_bytes(request, body), True)

    def _mutate_target(self, request: Request) -> Request:
        rng = self._rng
        if request.query and rng.random() < 0.7:
            name = rng.choice(list(request.query))
            value = rng.choice((*_NUMBERS, *map(str, INTEGERS), str(-(2**70)), str(2**70), "0.001"))
            return request._replace(query={**request.query, name: value})
        chance = rng.random()
        if chance < 0.5:
            return request._replace(path=rng.choice(_PATHS))
        if chance < 0.7:
            return request._replace(method=rng.choice(_METHODS))
        return request._replace(path=request.path + rng.choice(("/", "x", "/abort", "?", "%", "#")))

    def _broken_http(self, request: Request, body: bytes | None) -> Message:
        rng = self._rng
        data = http_bytes(request, body)
        head, gap, rest = data.partition(b"\r\n\r\n")
        match rng.randrange(4):
            case 0:
                data = head + b"\r\n" + rng.choice(_HEADERS) + gap[2:] + rest
            case 1:
                data = mutate_bytes(data, rng)
            case 2:
                data = data[: rng.randrange(len(data))]
            case 3:
                data = mutate_bytes(head, rng) + gap + rest
        return Message(data, True, cut=True)


def _typed(value: Any, rng: random.Random) -> Any:
    """One part of the value changed, and its type kept."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((*INTEGERS, value + 1, value - 1, value + 4))
        case dict() if value:
            name = rng.choice(list(value))
            return {**value, name: _typed(value[name], rng)}
        case list() | tuple() if value:
            items = list(value)
            at = rng.randrange(len(items))
            match rng.randrange(4):
                case 0:
                    del items[at]
                case 1:
                    items.insert(at, rng.choice(items))
                case _:
                    items[at] = _typed(items[at], rng)
            return items
    return mutate(value, rng)


def _plain(message: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return plain


def shown(data: bytes) -> str:
    """The message for a person: decoded where possible, and shortened."""
    try:
        text = repr(_shortened(msgspec.msgpack.decode(data[_LENGTH.size :])))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = repr(data)
    return text if len(text) <= 1_500 else f"{text[:1_500]}..."


def _shortened(value: Any) -> Any:
    match value:
        case dict():
            return {name: _shortened(part) for name, part in value.items()}
        case list() if len(value) > 8:
            return [*map(_shortened, value[:8]), f"{len(value)} in all"]
        case list():
            return [_shortened(part) for part in value]
        case bytes() if len(value) == 32:
            return value[:2]
    return value
