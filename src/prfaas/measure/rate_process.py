"""The processes of a measurement: some send through probes, others run a listener.

Each end has interpreters of its own, as in a deployment: two ends in one interpreter would wait for
each other's lock. A process reads jobs from standard input, one line of JSON each, writes one
line for each, and ends when its input ends. So it also ends when the command that started it is
killed.
"""

from __future__ import annotations

import os
import select
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from prfaas.clock import MonotonicClock
from prfaas.errors import PeerError
from prfaas.interpreter import module_command
from prfaas.measure.path_probe import Allowance, Delivery, Frames, Probe
from prfaas.security.tls import client_context, server_context
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.meter import tcp_info

_START_S = 30.0  # for a process to start on a busy machine
_END_S = 5.0
_MOST_LINE_BYTES = 1 << 20
_MOST_AT_ONCE = 16  # connections that are being opened
_UNLIMITED_BYTES = 1 << 60

T = TypeVar("T")


class TlsPaths(msgspec.Struct, frozen=True):
    """The files of one end of mutual TLS."""

    ca: str
    cert: str
    key: str


class ListenJob(msgspec.Struct, frozen=True, tag="listen"):
    """Listen on loopback and discard what arrives."""

    tls: TlsPaths | None


class CpuJob(msgspec.Struct, frozen=True, tag="cpu"):
    """Report the CPU time that this process has used."""


class ConnectJob(msgspec.Struct, frozen=True, tag="connect"):
    """Open connections, for the next SendJob."""

    host: str
    port: int
    tls: TlsPaths | None
    connections: int


class SendJob(msgspec.Struct, frozen=True, tag="send"):
    """Send on all connections, until the time is over or the bytes are used up. Close them."""

    seconds: float
    warm_up_s: float
    nbytes: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    host: str
    port: int


class Cpu(msgspec.Struct, frozen=True, tag="cpu"):
    seconds: float


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    pass


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    deliveries: list[Delivery]  # one for each connection
    retransmitted_segments: int | None  # None where the platform does not report it
    cpu_s: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The peer could not be reached, or broke the connection."""

    problem: str


Job = ListenJob | CpuJob | ConnectJob | SendJob
Answer = Listening | Cpu | Connected | Sent | Failed


class RateProcess:
    """One such process, as the process that started it sees it."""

    def __init__(self) -> None:
        # The same modules as in this process, wherever it found them.
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        try:
            self._errors = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                module_command(__name__),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": path},
                process_group=0,  # Ctrl-C reaches only the command, which then ends this process
            )
        except OSError as error:
            raise PeerError(f"cannot start a process for the measurement: {error}") from None
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, job: Job) -> None:
        """Begins a job. `wait_for` returns its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost("ended") from None

    def wait_for(self, kind: type[T], within_s: float) -> T:
        """Raises PeerError when the job failed, or took longer than that."""
        answer = msgspec.json.decode(self._line(_START_S + within_s), type=Answer)
        if isinstance(answer, Failed):
            raise PeerError(answer.problem)
        assert isinstance(answer, kind)
        return answer

    def ask(self, job: Job, kind: type[T], within_s: float) -> T:
        self.tell(job)
        return self.wait_for(kind, within_s)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # the process has ended already
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _line(self, within_s: float) -> bytes:
        assert self._process.stdout is not None
        output, until_s = self._process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._pending:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or len(self._pending) > _MOST_LINE_BYTES:
                raise self._lost("did not answer in time")
            if select.select([output], [], [], left_s)[0]:
                data = os.read(output, 1 << 16)
                if not data:
                    raise self._lost("ended")
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _lost(self, how: str) -> PeerError:
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace").strip().splitlines()
        return PeerError(f"a process of this measurement {how}: {(printed or ['no output'])[-1]}")


class _Worker:
    """Does the jobs inside a process of its own."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self._probes: list[Probe] = []
        self._frames: Frames | None = None

    def do(self, job: Job) -> Answer:
        match job:
            case ListenJob():
                return self._listen(job)
            case ConnectJob():
                return self._connect(job)
            case SendJob():
                return self._send(job)
            case CpuJob():
                return Cpu(time.process_time())

    def _listen(self, job: ListenJob) -> Listening:
        options = ListenerOptions(measure_bytes_per_minute=_UNLIMITED_BYTES)
        tls = None if job.tls is None else _server_tls(job.tls)
        return Listening(*Listener(options=options, tls=tls).address)  # until this process ends

    def _connect(self, job: ConnectJob) -> Connected:
        self.close_probes()  # of a measurement for which another process could not connect
        tls = None
        if job.tls is not None:
            tls = client_context(Path(job.tls.ca), Path(job.tls.cert), Path(job.tls.key))
        self._frames = self._frames or Frames()

        def open_probe(_: int) -> None:
            probe = Probe((job.host, job.port), tls, self._clock)
            self._probes.append(probe)
            probe.handshake()
            probe.ping()  # the listener then knows the connection for a path check

        # Side by side: one after another would take several round trips for each connection.
        with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
            list(threads.map(open_probe, range(job.connections)))  # raises the first error
        return Connected()

    def _send(self, job: SendJob) -> Sent:
        assert self._frames is not None and self._probes
        allowance, frames = Allowance(job.nbytes), self._frames
        results: dict[int, Delivery | PeerError] = {}

        def run(index: int, probe: Probe) -> None:
            try:
                results[index] = probe.send_for(job.seconds, job.warm_up_s, allowance, frames)
            except PeerError as error:
                results[index] = error

        threads = [
            threading.Thread(target=run, args=numbered) for numbered in enumerate(self._probes)
        ]
        began_s = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cpu_s = time.process_time() - began_s
        infos = [tcp_info(probe.channel) for probe in self._probes]
        self.close_probes()
        deliveries: list[Delivery] = []
        for result in results.values():
            if isinstance(result, PeerError):
                raise result
            deliveries.append(result)
        known = [info.retransmitted_segments for info in infos if info is not None]
        return Sent(deliveries, sum(known) if known else None, cpu_s)

    def close_probes(self) -> None:
        while self._probes:
            self._probes.pop().close()


def _server_tls(files: TlsPaths) -> Callable[[], ssl.SSLContext]:
    context = server_context(Path(files.ca), Path(files.cert), Path(files.key))
    return lambda: context


def main() -> None:
    worker = _Worker()
    for line in sys.stdin.buffer:
        answer: Answer
        try:
            answer = worker.do(msgspec.json.decode(line, type=Job))
        except PeerError as error:
            worker.close_probes()
            answer = Failed(str(error))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
