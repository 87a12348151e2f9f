"""The grammar host (`host`) as the node sees it: started once, and again when it has ended."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
from contextlib import suppress
from typing import NamedTuple

import msgspec

from prfaas.engine.guided import frames
from prfaas.engine.guided.frames import Ready, Setup
from prfaas.errors import EngineError, InputError
from prfaas.interpreter import module_command

_LOG = logging.getLogger(__name__)
MODULE = "prfaas.engine.guided.host"
START_S = 120.0  # a vocabulary of 200,000 tokens takes seconds
END_S = 10.0
_SEND_S = 10.0
_DYING_S = 0.1  # between the end of a grammar's process and that of the host, where both end
_READY = msgspec.msgpack.Decoder(Ready)


class HostCopy(NamedTuple):
    """A process for one grammar."""

    connection: socket.socket
    host: subprocess.Popen[bytes]

    def host_has_ended(self) -> bool:
        """Waits a moment for it."""
        try:
            return self.host.wait(_DYING_S) is not None
        except subprocess.TimeoutExpired:
            return False


class HostProcess:
    """Any thread may use it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._problem = ""
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Returns when grammars can be compiled. Raises `EngineError`, and `InputError` when the
        library does not support the vocabulary."""
        with self._lock:
            self._ensure_started()

    def copy(self) -> HostCopy:
        """Raises what `start` raises."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, self._lock:
                host = self._ensure_started()
                try:
                    self._send(theirs)
                except OSError:
                    _LOG.warning("the process that compiles grammars has ended; it is restarted")
                    self._end()
                    host = self._ensure_started()
                    self._send(theirs)
        except OSError as error:
            ours.close()
            raise EngineError(f"grammars cannot be compiled: {error}") from None
        except BaseException:
            ours.close()
            raise
        return HostCopy(ours, host)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise EngineError("grammars cannot be compiled: the node is shutting down")
        if self._popen is not None and self._popen.poll() is not None:
            self._end()
        if self._popen is None and not self._problem:
            try:
                self._problem = self._started()
            except (OSError, EngineError) as error:
                self._end()
                raise EngineError(f"the process that compiles grammars: {error}") from None
        if self._problem:
            self._end()
            raise InputError(
                f"grammars do not support this model's tokenizer: {self._problem}",
                fix="leave the field out",
            )
        assert self._popen is not None
        return self._popen

    def _started(self) -> str:
        """Why the library cannot use the vocabulary; empty: it can."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._popen = subprocess.Popen(
                module_command(MODULE, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(START_S)
        frames.send(self._control, self._setup)
        ready = frames.receive(self._control, _READY)
        if ready is None:
            raise EngineError("it has ended while it started")
        self._control.settimeout(_SEND_S)
        return ready.problem

    def _send(self, connection: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [b"\0"], [connection.fileno()])

    def _end(self) -> None:
        """Its copies end with it."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
        popen, self._popen = self._popen, None
        if popen is not None:
            popen.kill()
            with suppress(subprocess.TimeoutExpired):
                popen.wait(END_S)
