"""A node and its kvd that answer at once: the rest of a request's time is the gateway's.

\b
    python bench/_null_node.py [--tokens N --event-s SECONDS] PORT NAME [PORT NAME ...]

With `--event-s` a stream has N tokens, one event every so many seconds. It implements the part of
both HTTP APIs that a gateway, or vLLM's router, uses. It grants every transfer, reports every
transfer as committed and streams its tokens in one piece otherwise. It computes and stores nothing.
It uses plain asyncio protocols, because a web framework would take longer than the time to be
measured.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import cast

import msgspec
import uvloop

from prfaas.catalog import Catalog
from prfaas.contracts.kvd_api import (
    ArrivalCounters,
    EngineReport,
    EventPage,
    KvdReport,
    Occupancy,
    PoolCounters,
    PoolReport,
    Role,
    TransferStatus,
    shapes_of,
)
from prfaas.contracts.openai_fields import known_fields
from prfaas.types import Compat, Grant, NodeId, TransferId

MODEL = "case-study-1t"
TOKENS = 8
BLOCK_TOKENS = 64
_SERVES = {"completions": sorted(known_fields("completions")), "chat": sorted(known_fields("chat"))}
_TOKEN = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"a"}]}\n\n'
_USAGE = (
    b'data: {"id":"x","object":"text_completion","choices":[],"usage":{"prompt_tokens":1,'
    b'"completion_tokens":%d,"total_tokens":1}}\n\n' % TOKENS
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_GENERATING = (b"/v1/completions", b"/v1/chat/completions")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAMED = _STREAM_HEAD + _chunk(_TOKEN * TOKENS + _USAGE + b"data: [DONE]\n\n") + b"0\r\n\r\n"
# vLLM's router copies this from the prefill's response into the decode request.
_PREFILLED = {
    "id": "x",
    "object": "text_completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False},
}
_METRICS = b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'


class _Opened(msgspec.Struct):
    """The part of an `OpenTransfer` that the answer repeats."""

    transfer_id: TransferId


_OPENED = msgspec.json.Decoder(_Opened)
_UNKNOWN = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


def _reply(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        kind,
        len(body),
        body,
    )


class Host:
    """The prepared responses of one node and its kvd."""

    def __init__(self, name: str, port: int) -> None:
        encode = msgspec.json.encode
        spec = Catalog.builtin().model(MODEL).spec()
        node, url = NodeId(name), f"http://127.0.0.1:{port}"
        compat = Compat(MODEL, "null", "bfloat16", "float32", BLOCK_TOKENS, "canonical")
        pool = PoolReport(
            compat,
            shapes_of(spec),
            BLOCK_TOKENS,
            1 << 20,
            Occupancy(1, 0, 0, 0, 0),
            {},
            PoolCounters(),
        )
        report = KvdReport(
            node=node,
            instance="null",
            data_address="127.0.0.1:1",
            role=Role(),
            engines=(EngineReport("null", url, 1),),
            pool=pool,
            incoming={},
            outgoing={},
            held_leases=0,
            arrivals=ArrivalCounters(0, 0, 0, 0, 0, 0),
            links=(),
            next_seq={node: 0},
        )
        card = {
            "id": MODEL,
            "object": "model",
            "max_model_len": 1 << 20,
            "prfaas": {"kvd_url": url, "serves": _SERVES},
        }
        self._fixed = {
            b"/v1/stats": _reply(encode(report)),
            b"/v1/models": _reply(encode({"object": "list", "data": [card]})),
            b"/v1/role": _reply(encode(Role())),
            b"/health": _reply(b"ok", b"text/plain"),
            b"/metrics": _reply(_METRICS, b"text/plain"),
        }
        self._events = _reply(encode(EventPage(node, "null", 0, snapshot={})))
        self._quiet = _reply(encode(EventPage(node, "null", 0)))
        self._prefilled = _reply(encode(_PREFILLED))
        self._transfer = _reply(encode(TransferStatus(TransferId("0"), "committed", "", 0)))

    def answer(self, path: bytes, body: bytes) -> bytes:
        if path in _GENERATING:
            return _STREAMED if b'"stream":true' in body else self._prefilled
        if path == b"/v1/open":
            grant = Grant(_OPENED.decode(body).transfer_id, "t", "127.0.0.1:1", {}, 1 << 40, 60.0)
            return _reply(msgspec.json.encode(grant))
        if path.startswith(b"/v1/transfers/"):
            return self._transfer
        if path.startswith(b"/v1/events"):
            return self._events if b"since=-1" in path else self._quiet
        return self._fixed.get(path.partition(b"?")[0], _UNKNOWN)

    def pending(self, path: bytes, body: bytes) -> asyncio.Future[None] | None:
        """What the answer waits for: nothing here. Programs that use this module may change it."""
        return None


class Http(asyncio.Protocol):
    """An HTTP/1.1 server protocol. Requests come one at a time, with a Content-Length."""

    def __init__(self, host: Host, tokens: int = TOKENS, event_s: float = 0.0) -> None:
        self._host = host
        self._tokens = tokens
        self._event_s = event_s
        self._held = bytearray()
        self._wanted = 0  # bytes of the current request, once its head has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        while len(self._held) >= self._wanted:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._held[:end])
            if not self._wanted:
                self._wanted = end + 4 + _length(head)
                continue
            body = bytes(self._held[end + 4 : self._wanted])
            del self._held[: self._wanted]
            self._wanted = 0
            path = head.split(b" ", 2)[1]
            if path in _GENERATING and self._event_s and b'"stream":true' in body:
                self._write(_STREAM_HEAD)
                self._write_event(self._tokens)
                continue
            answer = self._host.answer(path, body)
            if b"since=0" in path:  # a long poll on a cache without events
                asyncio.get_running_loop().call_later(30, self._write, answer)
            elif (pending := self._host.pending(path, body)) is not None:
                pending.add_done_callback(lambda _, answer=answer: self._write(answer))  # type: ignore[misc]
            else:
                self._write(answer)

    def _write_event(self, left: int) -> None:
        if left:
            self._write(_chunk(_TOKEN))
            asyncio.get_running_loop().call_later(self._event_s, self._write_event, left - 1)
        else:
            self._write(_chunk(_USAGE + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def serve(hosts: dict[int, str], tokens: int, event_s: float) -> None:
    loop = asyncio.get_running_loop()
    for port, name in hosts.items():
        host = Host(name, port)
        make = partial(Http, host, tokens, event_s)
        await loop.create_server(make, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--event-s", type=float, default=0.0)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    words = given.words
    ports = {int(port): name for port, name in zip(words[::2], words[1::2], strict=True)}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(ports, given.tokens, given.event_s))
