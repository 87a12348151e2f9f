"""One worker process and its socket. It has one job at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from prfaas.gateway.body_workers.messages import (
    PACKET_BYTES,
    Job,
    Ready,
    Refused,
    Reply,
    WorkerSettings,
    read_reply,
)
from prfaas.interpreter import module_command
from prfaas.service.logging import configured_format

_LOG = logging.getLogger(__name__)
_PROGRAM = "prfaas.gateway.body_workers.worker"
_START_S = 60.0  # a tokenizer of 200,000 tokens takes seconds
_REAP_S = 10.0
# The worker uses one thread, and returns the memory of a body to the kernel.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
}


class WorkerLost(Exception):
    """The worker process ended, or did not answer in time, or could not be started."""

    def __init__(
        self, reason: str, *, timed_out: bool = False, out_of_memory: bool = False
    ) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.out_of_memory = out_of_memory

    @property
    def by_body(self) -> bool:
        """Whether the body that it read is the reason."""
        return self.timed_out or self.out_of_memory


class Answer(NamedTuple):
    reply: Reply
    files: list[int]  # descriptors, which the caller has to close


class WorkerProcess:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    async def start(self) -> None:
        """Does nothing when the process runs. Raises `WorkerLost`."""
        if self._popen is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._socket = ours
            try:
                self._popen = await asyncio.to_thread(_spawn, theirs.fileno())
            except OSError as error:
                await self.stop()
                raise WorkerLost(f"a body worker does not start: {error}") from None
        try:
            self._send(msgspec.json.encode(self._settings), [])
            answer = await self._receive(_START_S)
        except WorkerLost:
            await self.stop()
            raise
        if not isinstance(answer.reply, Ready):
            await self.stop()
            problem = answer.reply.problem if isinstance(answer.reply, Refused) else "bad answer"
            raise WorkerLost(f"a body worker does not start: {problem}")

    async def run(self, job: Job, body: int, started: Callable[[], None]) -> Answer:
        """The worker's answer to the job; closes `body`. `started` is called when the process is
        there, which may take seconds. Raises `WorkerLost`; then the process has been stopped, and
        the next job starts a new one."""
        packet = msgspec.json.encode(job)
        try:
            await self.start()
            started()
            try:
                self._send(packet, [body])
            except _NotSent:
                # It ended while it had nothing to do, so this body is not the reason.
                await self.stop()
                await self.start()
                self._send(packet, [body])
        except WorkerLost:
            await self.stop()
            raise
        finally:
            # The worker closes the body last. Freeing 60 MB takes milliseconds.
            os.close(body)
        try:
            answer = await self._receive(self._settings.job_s)
        except WorkerLost:
            await self.stop()
            raise
        if isinstance(answer.reply, Refused) and answer.reply.ends:
            await self.stop()
        return answer

    async def stop(self) -> None:
        """Kills the process, which has nothing to lose, and returns when it is gone."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        popen, self._popen = self._popen, None
        if popen is not None:
            popen.kill()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(popen.wait, _REAP_S)

    def _send(self, packet: bytes, files: list[int]) -> None:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [packet], files)
        except OSError as error:
            raise _NotSent(f"a body worker had ended: {error}") from None

    async def _receive(self, patience_s: float) -> Answer:
        connection, loop = self._socket, asyncio.get_running_loop()
        assert connection is not None
        received: asyncio.Future[tuple[bytes, list[int]]] = loop.create_future()

        def receive() -> None:
            try:
                data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if received.done():
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                received.set_result((data, descriptors))

        loop.add_reader(connection.fileno(), receive)
        try:
            async with asyncio.timeout(patience_s):
                data, descriptors = await received
        except TimeoutError:
            problem = f"a body worker did not answer within {patience_s:g} s"
            raise WorkerLost(problem, timed_out=True) from None
        finally:
            loop.remove_reader(connection.fileno())
        try:
            return Answer(read_reply(data), descriptors)
        except msgspec.MsgspecError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise await self._loss() from None

    async def _loss(self) -> WorkerLost:
        """Why the process ended."""
        assert self._popen is not None
        try:
            code = await asyncio.to_thread(self._popen.wait, _REAP_S)
        except subprocess.TimeoutExpired:
            return WorkerLost("a body worker closed its socket")
        if code >= 0:
            return WorkerLost(f"a body worker ended with exit code {code}")
        # The tokenizer's library aborts the process when it gets no memory.
        return WorkerLost(
            f"a body worker ended by {signal.Signals(-code).name}",
            out_of_memory=-code == signal.SIGABRT,
        )


class _NotSent(WorkerLost):
    """The job did not reach the worker."""


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    # The same modules as in this process, wherever it found them.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return subprocess.Popen(
        module_command(_PROGRAM, str(descriptor), configured_format()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
    )
