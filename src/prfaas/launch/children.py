"""Child processes: started until they say that they are ready, watched, ended in order.

Everything a child prints goes to a log of its own. Its end is news unless it was asked for. Each
has a session of its own, so that Ctrl-C reaches only us and the children end in their order.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.errors import PrfaasError

LAST_LINES = 12
END_S = 10.0  # for a child to end what it is doing


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    arguments: Sequence[str]
    ready: str  # a pattern; its first group is the answer to "where are you?"
    environment: Mapping[str, str] = field(default_factory=dict)
    heard: Callable[[str], None] | None = None  # is given every line that it prints


class ChildDied(PrfaasError):
    """A child ended that nobody had asked to."""

    def __init__(self, name: str, code: int, log: Path, last_lines: Sequence[str]) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        super().__init__("\n".join([f"{name} {how}; its log is {log}", *last_lines]))
        self.name = name


class Child:
    def __init__(self, command: Command, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = command.name
        self.process = process
        self.log = log
        self._ready = re.compile(command.ready)
        self._heard = command.heard
        self._found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.ending = False
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Until the child has ended."""
        assert self.process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            while line := await self._line():
                log.write(line)
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                if self._heard is not None:
                    self._heard(text)
                match = self._ready.search(text)
                if match and not self._found.done():
                    self._found.set_result(match[1])
        await self.process.wait()

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        try:
            return await self.process.stdout.readuntil()
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError as error:
            return await self.process.stdout.readexactly(error.consumed)

    async def ready(self) -> str:
        """Raises `ChildDied`."""
        either: set[asyncio.Future[Any]] = {self._found, self.reader}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._found.done():
            raise self.died()
        return self._found.result()

    def died(self) -> ChildDied:
        code = self.process.returncode
        return ChildDied(self.name, 0 if code is None else code, self.log, list(self._last))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    def freeze(self) -> None:
        """It stays, and does nothing until `thaw`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """As a crash does: it has no time for anything."""
        self.ending = True
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.reader

    async def end(self) -> None:
        """Asks it to end; after `END_S` it is ended, with whatever it has started."""
        self.ending = True
        if self.process.returncode is None:
            self.process.terminate()
            done, _ = await asyncio.wait({self.reader}, timeout=END_S)
            if not done:
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.reader


class Children:
    """Use as a context manager: leaving ends whoever still runs, latest first."""

    def __init__(
        self, folder: Path, tether: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """`tether` goes in front of every command: it lets a child die with us. `environment` is
        added to everybody's."""
        self.folder = folder
        self._tether = tether
        self._environment = {**os.environ, **(environment or {})}
        self._all: list[Child] = []

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end(self._all)

    async def start(self, command: Command) -> Child:
        """Does not wait for it to be ready."""
        process = await asyncio.create_subprocess_exec(
            *self._tether,
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

    async def started(self, commands: Sequence[Command]) -> dict[str, str]:
        """All at once; where each one is, by name. Raises `ChildDied`."""
        children = [await self.start(command) for command in commands]
        found = await asyncio.gather(*(child.ready() for child in children))
        return {child.name: where for child, where in zip(children, found, strict=True)}

    def named(self, name: str) -> Child:
        """The latest of that name: one that was killed may have been started again."""
        return next(child for child in reversed(self._all) if child.name == name)

    def __iter__(self) -> Iterator[Child]:
        """Those that run."""
        return (child for child in self._all if child.process.returncode is None)

    async def until_one_dies(self) -> ChildDied:
        """Returns only when a child has ended unasked."""
        while True:
            running = {child.reader: child for child in self._all if not child.ending}
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for reader in done:
                if not running[reader].ending:
                    return running[reader].died()

    async def end(self, children: Sequence[Child]) -> None:
        """In the order opposite to their start, those of one kind of work together: whoever serves
        ends before what it is served by."""
        for child in children:
            child.ending = True
        await asyncio.gather(*(child.end() for child in reversed(children)))
        self._all = [child for child in self._all if child not in children]
