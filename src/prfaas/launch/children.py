"""Child processes: started, awaited until they are ready, watched, ended in order.

Each child has a log file for all that it prints. The end of a child is an error unless the parent
requested it. Each child has its own session, so that Ctrl-C reaches only the parent, which then
ends the children in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from prfaas.errors import PrfaasError

LAST_LINES = 12
END_S = 10.0  # for a child to finish after SIGTERM

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Command(Generic[R]):
    """One child process. `R` is what the child announces when it is ready."""

    name: str
    arguments: Sequence[str]
    readiness: Callable[[str], R | None]  # parses a printed line; None: not the announcement
    environment: Mapping[str, str] = field(default_factory=dict)
    on_line: Callable[[str], None] | None = None  # called with every line that the child prints


class ChildDied(PrfaasError):
    """A child ended that the parent did not end."""

    def __init__(self, name: str, code: int, log: Path, last_lines: Sequence[str]) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        super().__init__("\n".join([f"{name} {how}; its log is {log}", *last_lines]))
        self.name = name


class Child(Generic[R]):
    def __init__(self, command: Command[R], process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = command.name
        self.process = process
        self.log = log
        self._readiness = command.readiness
        self._on_line = command.on_line
        self._announced: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.ending = False
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Reads until the child has ended."""
        assert self.process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            while line := await self._line():
                log.write(line)
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                if self._on_line is not None:
                    self._on_line(text)
                if not self._announced.done():
                    message = self._readiness(text)
                    if message is not None:
                        self._announced.set_result(message)
        await self.process.wait()

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        try:
            return await self.process.stdout.readuntil()
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError as error:
            return await self.process.stdout.readexactly(error.consumed)

    async def ready(self) -> R:
        """Waits for the announcement. Raises `ChildDied`."""
        either: set[asyncio.Future[Any]] = {self._announced, self.reader}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._announced.done():
            raise self.died()
        return self._announced.result()

    def died(self) -> ChildDied:
        code = self.process.returncode
        return ChildDied(self.name, 0 if code is None else code, self.log, list(self._last))

    def write_line(self, line: str) -> None:
        """Writes to the child's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    def freeze(self) -> None:
        """Stops the child with SIGSTOP until `thaw`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """Ends the child as a crash does, without time to clean up."""
        self.ending = True
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.reader

    async def end(self) -> None:
        """Sends SIGTERM, and after `END_S` kills the child with all processes of its session."""
        self.ending = True
        if self.process.returncode is None:
            self.process.terminate()
            done, _ = await asyncio.wait({self.reader}, timeout=END_S)
            if not done:
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.reader


class Children:
    """All child processes. Use it as a context manager: leaving ends those that still run."""

    def __init__(
        self, folder: Path, prefix: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """`prefix` goes before the arguments of every command (see
        `launch.attached_process.attached_prefix`). `environment` is added to that of every
        child."""
        self.folder = folder
        self._prefix = prefix
        self._environment = {**os.environ, **(environment or {})}
        self._all: list[Child[Any]] = []

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end(self._all)

    async def start(self, command: Command[R]) -> Child[R]:
        """Starts a child and does not wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            *self._prefix,
            *command.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._environment, **command.environment},
            start_new_session=True,
        )
        child = Child(command, process, self.folder / f"{command.name}.log")
        self._all.append(child)
        return child

    async def start_all(self, commands: Sequence[Command[R]]) -> dict[str, R]:
        """Starts all at once and waits until all are ready. The announcements, by name. Raises
        `ChildDied`."""
        children = [await self.start(command) for command in commands]
        announced = await asyncio.gather(*(child.ready() for child in children))
        return {child.name: message for child, message in zip(children, announced, strict=True)}

    def named(self, name: str) -> Child[Any]:
        """The latest child of that name: a killed one may have been started again."""
        return next(child for child in reversed(self._all) if child.name == name)

    def __iter__(self) -> Iterator[Child[Any]]:
        """The running children."""
        return (child for child in self._all if child.process.returncode is None)

    async def until_one_dies(self) -> ChildDied:
        """Returns when a child has ended that the parent did not end."""
        while True:
            running = {child.reader: child for child in self._all if not child.ending}
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for reader in done:
                if not running[reader].ending:
                    return running[reader].died()

    async def end(self, children: Sequence[Child[Any]]) -> None:
        """Ends these children together. SIGTERM is sent to the latest first, so that a gateway
        stops before its nodes, and a node before its kvd."""
        for child in children:
            child.ending = True
        await asyncio.gather(*(child.end() for child in reversed(children)))
        self._all = [child for child in self._all if child not in children]
