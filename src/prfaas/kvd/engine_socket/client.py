"""The engine's client of its kvd on the Unix socket: synchronous, for any thread. No asyncio, no
torch.

One connection, one registration, one mapping of the arena. When the kvd exits, calls and leases of
that connection end with ConnectionLost, and the client connects and registers again. A restarted
kvd starts empty, so no lease survives. Memory that still has views stays mapped.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import NamedTuple

import msgspec

from prfaas.cache.hashing import GroupNames
from prfaas.cache.storage.arena import Arena
from prfaas.contracts.kvd_api import shapes_of
from prfaas.errors import ConnectionLost, InputError, PrfaasError, TransferFailed, WireError
from prfaas.kvd.engine_socket.leases import MappedArena, ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Answer,
    Attach,
    Begin,
    Call,
    Flush,
    FrameReader,
    Join,
    LeaseTicket,
    NumberedAnswer,
    NumberedCall,
    Pin,
    Publish,
    Ready,
    Refused,
    Register,
    Registered,
    Release,
    SegmentName,
    TransferEnded,
    decode_answer,
    frame,
)
from prfaas.kvspec import KVSpec
from prfaas.types import Compat, Grant, NotNow, TransferId

_LOG = logging.getLogger(__name__)

ANSWER_S = 60.0  # the timeout of a call: the kvd may write to SSD before it answers
SEND_S = ANSWER_S  # to a kvd that does not read
_HAND_OVER_S = 1.0  # from this connection's reader to the thread that waits for an answer
_CONNECT_S = 5.0
_RECONNECT_S = 0.5  # between two attempts to reconnect to a kvd that has exited
_READ_BYTES = 1 << 16


class KvdClient:
    """`with KvdClient(path, ...) as kvd:`; the constructor connects and registers.

    `whole_blocks`: the engine's blocks are opaque, so attention and window segments begin and end
    at block boundaries (the last one may extend beyond `tokens`).

    `further`: this is another form of an engine whose first form another client has registered.
    The constructor returns also when the kvd does not take the form (now): the client goes on
    trying, and raises what it was told from every call until then.

    `keeps_answers`: the engine calls `begin_answer`, so that the kvd sets pages aside.
    """

    # limits: everything that an engine registers with.
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
        further: bool = False,
        keeps_answers: bool = False,
    ) -> None:
        self.spec = spec
        self.block_tokens = block_tokens
        self._path = str(path)
        self._register = Register(
            engine_id,
            shapes_of(spec),
            block_tokens,
            compat,
            whole_blocks,
            url,
            further,
            keeps_answers,
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connection: _Connection | None = None
        self._on_memory: Callable[[mmap.mmap], None] | None = None
        self._logged = ""  # the problem of the latest attempt to register
        try:
            self._connected()
        except PrfaasError as error:
            if not further:
                raise
            self._log_once(error)
        # A thread reconnects, not the next call: gateways send no hand-off to an engine that is not
        # registered, so an engine that waits for hand-offs would never make that call.
        self._reconnector = threading.Thread(
            target=self._reconnect_loop, name="prfaas-kvd-reconnect", daemon=True
        )
        self._reconnector.start()

    def __enter__(self) -> KvdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def registered(self) -> Registered:
        """The kvd's answer to the registration: its name, addresses and arena."""
        if self._connection is None:
            raise ConnectionLost(f"not registered with the kvd yet: {self._logged}")
        return self._connection.registered

    @property
    def connected(self) -> bool:
        """Whether the kvd is there. After it has exited, the client connects again."""
        connection = self._connection
        return connection is not None and not connection.gone

    def watch_memory(self, call: Callable[[mmap.mmap], None]) -> None:
        """Calls `call` with this process's mapping of the arena: at once, when the client is
        registered, and each time after it has registered with a new kvd, in any thread. `call` must
        neither block nor raise."""
        with self._lock:
            self._on_memory = call
            if self._connection is not None:
                call(self._connection.memory)

    def begin(
        self,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        checkpoint_tokens: Sequence[int] | None = None,
        grant: Grant | None = None,
        tail: bytes = b"",
        tenant: str = "",
    ) -> WriteLease | NotNow:
        """Pages for a prefill up to `tokens`. `hashes` identify its whole blocks, and `tail` (a
        `tail_hash`) the tokens after them: the engine that attaches the transfer compares both with
        its prompt.

        `checkpoint_tokens`: the boundaries whose states are kept; None lets the pool's policy
        choose. The checkpoints of the `grant` are always included. With a grant, state is sent to
        the receiver as it becomes ready. `tenant`: whose prompt it is, where no grant says so.
        """
        wanted = None if checkpoint_tokens is None else tuple(checkpoint_tokens)
        connection = self._connected()
        return connection.begin(Begin(tuple(hashes), tokens, wanted, grant, tail, tenant=tenant))

    def begin_answer(
        self, hashes: Sequence[bytes], tokens: int, *, first_token: int, tenant: str = ""
    ) -> WriteLease | NotNow:
        """Pages for an answer that has ended: `hashes` identify the whole blocks of prompt and
        answer, up to `tokens`, a block boundary. The engine has full attention from `first_token`
        on, and windows and states after `tokens`. The lease pins nothing, so a commit fails with
        TransferFailed when the pool has lost what precedes the answer."""
        call = Begin(tuple(hashes), tokens, answer_from=first_token, tenant=tenant)
        return self._connected().begin(call)

    def attach(self, transfer_id: TransferId, attachments: int = 1) -> ReadLease:
        """Takes over a committed transfer. TransferFailed names the reason when this is not
        possible: not committed yet, failed, already attached, or unknown. `attachments`: how often
        this client will attach it, this time included; the first call decides."""
        connection = self._connected()
        return connection.given(_ticket(connection.call(Attach(transfer_id, attachments))))

    def pin(self, hashes: Sequence[bytes]) -> ReadLease | NotNow:
        """Pins the longest cached prefix; `tokens` of the lease may be 0. An engine always computes
        the last token, so `hashes` must be those of the prompt without it."""
        connection = self._connected()
        answer = connection.call(Pin(tuple(hashes)))
        return answer if isinstance(answer, NotNow) else connection.given(_ticket(answer))

    def join_write(self, ticket: LeaseTicket) -> WriteLease:
        """Writes into the lease of another process, which commits or aborts it. Call `flush` before
        reporting to the owner that this process has finished. TransferFailed when the lease has
        ended, or is of another kvd process than the one that this client is connected to."""
        return self._joined(ticket).write_lease(ticket, Future())

    def join_read(self, ticket: LeaseTicket) -> ReadLease:
        """Reads from the lease of another process, which releases it."""
        return self._joined(ticket).read_lease(ticket)

    def flush(self) -> None:
        """Returns when the kvd has handled every earlier message of this connection."""
        self._connected().call(Flush())

    def publish(
        self,
        payload: bytes,
        group_names: Mapping[int, GroupNames] | None = None,
        block_tokens: int = 0,
    ) -> None:
        """Publishes one payload of the engine's KV events in vLLM's format. Gateways receive hashes
        only. `group_names` defaults to the names of the spec's groups, in order. Where the engine's
        own blocks may have another size than the pool's, pass the pool's as `block_tokens`: the kvd
        then announces blocks of that size."""
        names: Mapping[int, GroupNames]
        names = group_names or {i: group.name for i, group in enumerate(self.spec.groups)}
        self._connected().call(Publish(payload, dict(names), block_tokens))

    def close(self) -> None:
        """Closes the connection; the kvd then releases every lease of this process."""
        with self._lock:
            self._closed.set()
            if self._connection is not None:
                self._connection.close()
        self._reconnector.join()

    def _joined(self, ticket: LeaseTicket) -> _Connection:
        """The connection to the kvd that made the ticket, which has accepted the join. Lease ids
        and page numbers begin anew with every kvd process: to any other process the ticket would
        name another request's pages."""
        connection = self._connected()
        if not ticket.instance or ticket.instance != connection.registered.instance:
            raise TransferFailed(f"the kvd that made lease {ticket.lease_id} has exited")
        connection.call(Join(ticket.lease_id, ticket.instance))
        return connection

    def _reconnect_loop(self) -> None:
        """Connects and registers again whenever the connection has ended."""
        while True:
            if self._connection is not None:
                self._connection.ended.wait()
            if self._closed.wait(_RECONNECT_S):  # an exiting kvd may still accept connections
                return
            try:
                self._connected()
                self._logged = ""
            except PrfaasError as error:
                self._log_once(error)

    def _log_once(self, error: PrfaasError) -> None:
        if str(error) != self._logged:
            self._logged = str(error)
            form = self._register.compat.form
            _LOG.warning("not registered with the kvd in the %s form: %s", form, self._logged)

    def _connected(self) -> _Connection:
        with self._lock:
            if self._closed.is_set():
                raise ConnectionLost("this client is closed")
            if self._connection is None or self._connection.ended.is_set():
                if self._connection is not None:
                    self._connection.close()
                self._connection = _Connection(self._path, self._register, self.spec)
                if self._on_memory is not None:
                    self._on_memory(self._connection.memory)
            return self._connection


class _Reply(NamedTuple):
    answer: Answer
    sent: Future[None]  # the end of the lease's transfer, if it has one


class _Connection:
    """One connection and its reader thread."""

    def __init__(self, path: str, register: Register, spec: KVSpec) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()  # protects the fields below
        self._numbers = 0
        self._waiting: dict[int, Future[_Reply]] = {}
        self._ready: dict[int, list[SegmentName]] = {}
        self._sent: dict[int, Future[None]] = {}  # by lease, until its transfer has ended
        self._sending = threading.Lock()  # protects the socket's write side and the order of frames
        self._socket = _connect(path)
        try:
            self.registered, fd = self._send_register(register)
            try:
                arena = _mapped(fd, self.registered)
            finally:
                os.close(fd)
            self._arena = MappedArena(spec, register.block_tokens, arena)
        except BaseException:
            self._socket.close()
            raise
        self._reader = threading.Thread(target=self._read, name="prfaas-kvd-client", daemon=True)
        self._reader.start()

    def begin(self, call: Begin) -> WriteLease | NotNow:
        answer, sent = self._ask(call)
        if isinstance(answer, NotNow):
            return answer
        ticket = _ticket(answer)
        try:
            return self.write_lease(ticket, sent)
        except InputError as error:
            self._return(Abort(ticket.lease_id, "the engine cannot use the ticket"))
            raise _bad_ticket(error) from None

    def given(self, ticket: LeaseTicket) -> ReadLease:
        """The lease of a ticket that the kvd has made for this connection."""
        try:
            return self.read_lease(ticket)
        except InputError as error:
            self._return(Release(ticket.lease_id))
            raise _bad_ticket(error) from None

    def _return(self, call: Abort | Release) -> None:
        """Ends a lease that this engine cannot use, so that the kvd does not hold its pages."""
        try:
            self.call(call)
        except PrfaasError as error:
            _LOG.warning("a lease was not returned to the kvd: %s", error)

    def call(self, call: Call) -> Answer:
        """The answer. A refusal is raised."""
        return self._ask(call).answer

    def _ask(self, call: Call) -> _Reply:
        future: Future[_Reply] = Future()
        with self._lock:
            if self.ended.is_set():
                raise ConnectionLost("the kvd has exited")
            self._numbers += 1
            number = self._numbers
        # Encoded before anything is sent: a call that cannot be encoded fails alone.
        encoded = _frame(NumberedCall(number, call))
        with self._lock:
            if self.ended.is_set():
                raise ConnectionLost("the kvd has exited")
            self._waiting[number] = future
        self._send(encoded)
        try:
            reply = _result_of(future)
        except FutureTimeout:
            self._end()
            raise ConnectionLost(f"the kvd did not answer within {ANSWER_S:g} s") from None
        if isinstance(reply.answer, Refused):
            if reply.answer.kind == "input":
                raise InputError(reply.answer.problem)
            raise TransferFailed(reply.answer.problem)
        return reply

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        """Segments that become ready while another thread sends share one frame."""
        with self._lock:
            self._ready.setdefault(lease_id, []).append(segment)
        self._send(None)

    @property
    def gone(self) -> bool:
        return self.ended.is_set()

    @property
    def memory(self) -> mmap.mmap:
        return self._arena.memory

    def write_lease(self, ticket: LeaseTicket, sent: Future[None]) -> WriteLease:
        return WriteLease(ticket, self._arena, self, sent)

    def read_lease(self, ticket: LeaseTicket) -> ReadLease:
        return ReadLease(ticket, self._arena, self)

    def close(self) -> None:
        self._end()
        self._reader.join()
        # A thread that is about to send must not find that its descriptor's number has become that
        # of the next connection.
        with self._sending:
            self._socket.close()

    def _send(self, encoded: bytes | None) -> None:
        """Sends pending `Ready`s before the call: a commit must not overtake them."""
        with self._sending:
            with self._lock:
                ready, self._ready = self._ready, {}
            frames = [frame(NumberedCall(0, Ready(i, tuple(names)))) for i, names in ready.items()]
            if encoded is not None:
                frames.append(encoded)
            try:
                if frames:
                    self._socket.sendall(b"".join(frames))
            except OSError:  # a timeout among them: a part of a frame may have been sent
                self._end()

    def _send_register(self, register: Register) -> tuple[Registered, int]:
        """Registers. The arena's descriptor comes with the first byte of the answer."""
        self._socket.settimeout(ANSWER_S)
        frames = FrameReader()
        descriptors: list[int] = []
        try:
            self._socket.sendall(frame(NumberedCall(1, register)))
            while True:
                data, received, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1)
                descriptors += received
                if not data:
                    raise ConnectionLost("the kvd closed the connection during the registration")
                for body in frames.feed(data):
                    answer = decode_answer(body).answer
                    if isinstance(answer, Refused):
                        raise InputError(answer.problem)
                    if not isinstance(answer, Registered) or len(descriptors) != 1:
                        raise WireError("the kvd's answer does not belong to a registration")
                    self._limit_sends()
                    return answer, descriptors.pop()
        except OSError as error:
            raise ConnectionLost(f"the registration with the kvd failed: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _limit_sends(self) -> None:
        """From now on the reader waits for as long as it takes, and a send at most as long as a
        call: a kvd that has stopped reading must not stop the engine's steps, which report segments
        without waiting for an answer."""
        self._socket.settimeout(None)
        seconds, rest = divmod(SEND_S, 1.0)
        limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._socket.recv(_READ_BYTES):
                for body in frames.feed(data):
                    self._handle(decode_answer(body))
        except (OSError, WireError):
            pass  # the kvd has exited, or is not a kvd: `_end` fails every pending call
        finally:
            self._end()

    def _handle(self, message: NumberedAnswer) -> None:
        if isinstance(message.answer, TransferEnded):
            with self._lock:
                sent = self._sent.pop(message.answer.lease_id, None)
            if sent is not None:
                _settle(sent, message.answer.reason)
            return
        with self._lock:
            waiting = self._waiting.pop(message.number, None)
            reply = _Reply(message.answer, Future())
            # Not in the waiting thread: the next frame may already have the end of the transfer.
            if isinstance(message.answer, LeaseTicket) and message.answer.sending:
                self._sent[message.answer.lease_id] = reply.sent
        if waiting is not None:
            waiting.set_result(reply)

    def _end(self) -> None:
        """Fails every pending call and transfer. Idempotent."""
        with self._lock:
            self.ended.set()
            waiting, self._waiting = self._waiting, {}
            unsettled, self._sent = self._sent, {}
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the socket is not connected any more
        for future in waiting.values():
            future.set_exception(ConnectionLost("the kvd has exited"))
        for sent in unsettled.values():
            _settle(sent, "the kvd has exited")


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"no kvd at {path}: {error.strerror or error}") from None
    return sock


def _mapped(fd: int, registered: Registered) -> Arena:
    """WireError when the kvd's answer does not describe the memory that came with it. The thread
    that reconnects goes on trying after it."""
    try:
        return Arena(fd, registered.page_bytes, registered.pages)
    except (InputError, OSError, ValueError, OverflowError) as error:
        raise WireError(f"the kvd's memory cannot be mapped: {error}") from None


def _bad_ticket(error: InputError) -> WireError:
    return WireError(f"the kvd's ticket cannot be used: {error}")


def _frame(call: NumberedCall) -> bytes:
    """InputError when the call has a value that no frame can carry."""
    try:
        encoded = frame(call)
    except (msgspec.MsgspecError, OverflowError, UnicodeError, TypeError) as error:
        raise InputError(f"the call cannot be sent to the kvd: {error}") from None
    if len(encoded) > MAX_FRAME_BYTES:  # the kvd would close the connection, with all its leases
        raise InputError(
            f"the call has {len(encoded)} bytes, the limit is {MAX_FRAME_BYTES}",
            fix="send a shorter prompt",
        )
    return encoded


def _result_of(future: Future[_Reply]) -> _Reply:
    """Raises FutureTimeout."""
    try:
        return future.result(ANSWER_S)
    except FutureTimeout:
        # After a pause of this process the answer may have come in time, and the reader runs only
        # now, as this thread does.
        return future.result(_HAND_OVER_S)


def _settle(sent: Future[None], reason: str) -> None:
    if reason:
        sent.set_exception(TransferFailed(reason))
    else:
        sent.set_result(None)


def _ticket(answer: Answer) -> LeaseTicket:
    if not isinstance(answer, LeaseTicket):
        raise WireError(f"the kvd answered with {type(answer).__name__} instead of a lease")
    return answer
