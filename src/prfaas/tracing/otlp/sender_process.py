"""The process that encodes spans and posts them to a collector, as its parent sees it.

OpenTelemetry's encoder takes about 65 µs for a span, which in Python would be a third of what a
gateway computes for a request. A process of its own leaves the parent half a microsecond per span,
and never delays the parent's event loop. It ends with its parent, because its input ends then.

    parent ──► About, then batches of spans (msgpack, each after its length) ──► sender.py
           ◄── one `Reply` for each of them ◄──
"""

from __future__ import annotations

import struct
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Final, TypeVar

import msgspec

from prfaas.errors import InputError
from prfaas.interpreter import module_command
from prfaas.tracing.spans import Span

MODULE: Final = "prfaas.tracing.otlp.sender"
RESTART_S = 10.0  # between two starts of a process that ends by itself
MOST_FRAME_BYTES = 64 << 20  # a batch of the longest spans has less
_LENGTH = struct.Struct("!I")
_ENDED = "the process that sends spans has ended"
T = TypeVar("T")


class About(msgspec.Struct, frozen=True):
    """The first message: where the spans go, and which process has made them."""

    url: str | None  # None: OpenTelemetry's variables name it
    service: str
    node: str


class Reply(msgspec.Struct, frozen=True):
    problem: str = ""  # empty: the collector has taken the spans


class SenderProcess:
    """One thread sends; another one may close it meanwhile. InputError when the process cannot
    work, for example because of a variable."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._closed = False
        self._started_s = 0.0
        self._process, problem = self._start()
        if problem:
            self.close()
            raise InputError(
                f"spans cannot be exported: {problem}",
                where="OTEL_EXPORTER_OTLP_*",
                fix="correct the variable, or unset it",
            )

    def send(self, spans: Sequence[Span]) -> str:
        """Waits until the collector has taken the spans. Returns why it has not; empty: it has."""
        if self._process.poll() is not None:
            if self._closed or time.monotonic() < self._started_s + RESTART_S:
                return _ENDED
            _close_pipes(self._process)
            self._process, problem = self._start()
            if problem:
                return problem
        return _exchange(self._process, spans)

    def close(self) -> None:
        """Ends the process, also while a thread waits for it."""
        self._closed = True
        self._process.kill()
        self._process.wait()
        _close_pipes(self._process)

    def _start(self) -> tuple[subprocess.Popen[bytes], str]:
        """The process, and why it cannot work."""
        self._started_s = time.monotonic()
        process = subprocess.Popen(
            module_command(MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return process, _exchange(process, self._about)


def _exchange(process: subprocess.Popen[bytes], message: object) -> str:
    assert process.stdin is not None and process.stdout is not None
    try:
        write_message(process.stdin, message)
        reply = read_message(process.stdout, Reply)
    except (OSError, ValueError, msgspec.MsgspecError):  # ValueError: closed meanwhile
        return _ENDED
    return _ENDED if reply is None else reply.problem


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:
            pass  # what was not written is lost with the process


def write_message(pipe: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: IO[bytes], kind: type[T]) -> T | None:
    """None at the end of the pipe, also in the middle of a message."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MOST_FRAME_BYTES:
        return None
    data = pipe.read(size)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == size else None
