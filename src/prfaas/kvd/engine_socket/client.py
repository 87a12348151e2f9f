"""An engine's side of the Unix socket: synchronous, for any thread. No asyncio, no torch.

One connection, one registration, one mapping of the arena. When the kvd goes away, calls and leases
of that connection end with ConnectionLost, and the client connects and registers anew: a restarted
kvd starts clean, so nothing is carried over. Memory that is still viewed stays mapped.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import NamedTuple

from prfaas.cache.storage.arena import Arena
from prfaas.contracts.kvd_api import shapes_of
from prfaas.errors import ConnectionLost, InputError, PrfaasError, TransferFailed, WireError
from prfaas.kvd.engine_socket.leases import Pages, ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import (
    Answer,
    Answered,
    Attach,
    Begin,
    Call,
    Flush,
    Frames,
    Join,
    Numbered,
    Pin,
    Publish,
    Ready,
    Refused,
    Register,
    Registered,
    SegmentName,
    Sent,
    Ticket,
    decode_answer,
    frame,
)
from prfaas.kvspec import KVSpec
from prfaas.types import Compat, Grant, NotNow, TransferId

_LOG = logging.getLogger(__name__)

ANSWER_S = 60.0  # the longest wait for an answer: a spill to SSD may come before it
_CONNECT_S = 5.0
_AGAIN_S = 0.5  # between two attempts to reach a kvd that went away
_READ_BYTES = 1 << 16


class KvdClient:
    """`with KvdClient(path, ...) as kvd:`; connects and registers at once.

    `whole_blocks`: the engine's blocks are opaque, so growing and window segments always begin and
    end at block boundaries (the last one may reach beyond `tokens`).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        engine_id: str,
        spec: KVSpec,
        block_tokens: int,
        compat: Compat,
        whole_blocks: bool = False,
        url: str | None = None,
    ) -> None:
        self.spec = spec
        self.block_tokens = block_tokens
        self._path = str(path)
        self._register = Register(
            engine_id, shapes_of(spec), block_tokens, compat, whole_blocks, url
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._session = _Session(self._path, self._register, spec)
        # Not left to the next call: gateways grant nothing to an engine that is not registered, so
        # that an engine which waits for hand-offs would never make one.
        self._keeper = threading.Thread(target=self._keep, name="prfaas-kvd-keeper", daemon=True)
        self._keeper.start()

    def __enter__(self) -> KvdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def registered(self) -> Registered:
        """What the kvd said of itself: its name in cache events, its addresses, its arena."""
        return self._session.registered

    def begin(
        self,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        checkpoint_tokens: Sequence[int] | None = None,
        grant: Grant | None = None,
        tail: bytes = b"",
    ) -> WriteLease | NotNow:
        """Room for a prefill up to `tokens`; `hashes` name its whole blocks, `tail` (a `tail_hash`)
        what lies behind them: whoever attaches the transfer compares both with its own prompt.

        `checkpoint_tokens` of None: the pool's policy says which boundary states it wants (the
        lease tells); else exactly these. What the `grant` asks for is always among them. With a
        grant, state leaves for its kvd as it becomes ready.
        """
        wanted = None if checkpoint_tokens is None else tuple(checkpoint_tokens)
        session = self._live()
        return session.begin(Begin(tuple(hashes), tokens, wanted, grant, tail))

    def attach(self, transfer_id: TransferId) -> ReadLease:
        """Takes over a committed transfer. TransferFailed, saying why, when there is none: not
        committed yet, lost, attached before, or unknown."""
        session = self._live()
        return session.read_lease(_ticket(session.call(Attach(transfer_id))))

    def pin(self, hashes: Sequence[bytes]) -> ReadLease | NotNow:
        """Holds the longest cached prefix; `tokens` of the lease may be 0. An engine computes at
        least the last token: name the blocks of the prompt without it."""
        session = self._live()
        answer = session.call(Pin(tuple(hashes)))
        return answer if isinstance(answer, NotNow) else session.read_lease(_ticket(answer))

    def join_write(self, ticket: Ticket) -> WriteLease:
        """Another process's lease, to write into from this one. Its owner commits or aborts; call
        `flush` before telling the owner that this process is done."""
        session = self._live()
        session.call(Join(ticket.lease_id))
        return session.write_lease(ticket, Future())

    def join_read(self, ticket: Ticket) -> ReadLease:
        """Another process's lease, to read from in this one. Its owner releases it."""
        session = self._live()
        session.call(Join(ticket.lease_id))
        return session.read_lease(ticket)

    def flush(self) -> None:
        """Everything said before on this connection has been acted on when this returns."""
        self._live().call(Flush())

    def publish(self, payload: bytes, group_names: Mapping[int, str] | None = None) -> None:
        """One payload of the engine's own KV events in vLLM's format. Gateways see hashes only.
        Groups are named as in the spec, in order, unless said otherwise."""
        names = group_names or {i: group.name for i, group in enumerate(self.spec.groups)}
        self._live().call(Publish(payload, dict(names)))

    def close(self) -> None:
        """Everything this process holds is released by the kvd."""
        with self._lock:
            self._closed.set()
            self._session.close()
        self._keeper.join()

    def _keep(self) -> None:
        """Registered, whenever there is a kvd."""
        told = ""
        while True:
            self._session.ended.wait()
            if self._closed.wait(_AGAIN_S):  # time, too, for a kvd that is going to be gone
                return
            try:
                self._live()
                told = ""
            except PrfaasError as error:
                if str(error) != told:
                    told = str(error)
                    _LOG.warning("not registered: %s", told)

    def _live(self) -> _Session:
        with self._lock:
            if self._closed.is_set():
                raise ConnectionLost("this client is closed")
            if self._session.ended.is_set():
                self._session.close()
                self._session = _Session(self._path, self._register, self.spec)
            return self._session


class _Reply(NamedTuple):
    answer: Answer
    sent: Future[None]  # of a lease with a transfer: how that ends


class _Session:
    """One connection and its reader."""

    def __init__(self, path: str, register: Register, spec: KVSpec) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()  # of the fields below
        self._numbers = 0
        self._waiting: dict[int, Future[_Reply]] = {}
        self._ready: dict[int, list[SegmentName]] = {}
        self._sent: dict[int, Future[None]] = {}  # by lease; until the kvd says how it ended
        self._sending = threading.Lock()  # of the socket's write side, and of the order of frames
        self._socket = _connect(path)
        try:
            self.registered, fd = self._greet(register)
        except BaseException:
            self._socket.close()
            raise
        try:
            arena = Arena(fd, self.registered.page_bytes, self.registered.pages)
        finally:
            os.close(fd)
        self._pages = Pages(spec, register.block_tokens, arena)
        self._reader = threading.Thread(target=self._read, name="prfaas-kvd-client", daemon=True)
        self._reader.start()

    def begin(self, call: Begin) -> WriteLease | NotNow:
        answer, sent = self._ask(call)
        return answer if isinstance(answer, NotNow) else self.write_lease(_ticket(answer), sent)

    def call(self, call: Call) -> Answer:
        """The answer; a refusal is raised."""
        return self._ask(call).answer

    def _ask(self, call: Call) -> _Reply:
        future: Future[_Reply] = Future()
        with self._lock:
            if self.ended.is_set():
                raise ConnectionLost("the kvd is gone")
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = future
        self._send(Numbered(number, call))
        try:
            reply = future.result(ANSWER_S)
        except FutureTimeout:
            self._end()
            raise ConnectionLost(f"no answer from the kvd for {ANSWER_S:g} s") from None
        if isinstance(reply.answer, Refused):
            if reply.answer.kind == "input":
                raise InputError(reply.answer.problem)
            raise TransferFailed(reply.answer.problem)
        return reply

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        """What comes while another thread is sending travels in one frame."""
        with self._lock:
            self._ready.setdefault(lease_id, []).append(segment)
        self._send(None)

    def write_lease(self, ticket: Ticket, sent: Future[None]) -> WriteLease:
        return WriteLease(ticket, self._pages, self, sent)

    def read_lease(self, ticket: Ticket) -> ReadLease:
        return ReadLease(ticket, self._pages, self)

    def close(self) -> None:
        self._end()
        self._reader.join()
        self._socket.close()

    def _send(self, message: Numbered | None) -> None:
        """What is ready goes before the message: a commit must not overtake it."""
        with self._sending:
            with self._lock:
                ready, self._ready = self._ready, {}
            frames = [frame(Numbered(0, Ready(i, tuple(names)))) for i, names in ready.items()]
            if message is not None:
                frames.append(frame(message))
            try:
                if frames:
                    self._socket.sendall(b"".join(frames))
            except OSError:
                self._end()

    def _greet(self, register: Register) -> tuple[Registered, int]:
        """The arena's descriptor comes with the first byte of the answer."""
        self._socket.settimeout(ANSWER_S)
        frames, descriptors = Frames(), []
        try:
            self._socket.sendall(frame(Numbered(1, register)))
            while True:
                data, received, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1)
                descriptors += received
                if not data:
                    raise ConnectionLost("the kvd hung up instead of answering")
                for body in frames.feed(data):
                    answer = decode_answer(body).answer
                    if isinstance(answer, Refused):
                        raise InputError(answer.problem)
                    if not isinstance(answer, Registered) or len(descriptors) != 1:
                        raise WireError("the kvd did not answer a registration")
                    self._socket.settimeout(None)
                    return answer, descriptors[0]
        except OSError as error:
            raise ConnectionLost(f"the kvd does not answer: {error}") from None

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self._socket.recv(_READ_BYTES):
                for body in frames.feed(data):
                    self._heard(decode_answer(body))
        except (OSError, WireError):
            pass  # the kvd is gone, or not one: everybody who waits is told below
        finally:
            self._end()

    def _heard(self, message: Answered) -> None:
        if isinstance(message.answer, Sent):
            with self._lock:
                sent = self._sent.pop(message.answer.lease_id, None)
            if sent is not None:
                _settle(sent, message.answer.reason)
            return
        with self._lock:
            waiting = self._waiting.pop(message.number, None)
            reply = _Reply(message.answer, Future())
            # Here and not by whoever waits: the next frame may already say how it ended.
            if isinstance(message.answer, Ticket) and message.answer.sending:
                self._sent[message.answer.lease_id] = reply.sent
        if waiting is not None:
            waiting.set_result(reply)

    def _end(self) -> None:
        """Everybody who waits learns that the kvd is gone. Idempotent."""
        with self._lock:
            self.ended.set()
            waiting, self._waiting = self._waiting, {}
            unsettled, self._sent = self._sent, {}
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more
        for future in waiting.values():
            future.set_exception(ConnectionLost("the kvd is gone"))
        for sent in unsettled.values():
            _settle(sent, "the kvd is gone")


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"no kvd at {path}: {error.strerror or error}") from None
    return sock


def _settle(sent: Future[None], reason: str) -> None:
    if reason:
        sent.set_exception(TransferFailed(reason))
    else:
        sent.set_result(None)


def _ticket(answer: Answer) -> Ticket:
    if not isinstance(answer, Ticket):
        raise WireError(f"the kvd answered {type(answer).__name__} for a lease")
    return answer
