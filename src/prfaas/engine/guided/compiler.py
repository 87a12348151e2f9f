"""Compiles grammars, and follows answers with them, in a process for each grammar (`host`).

    GrammarCompiler ──► HostProcess ──► host ──► a process for each grammar
    CompiledGrammar ──► one connection ──────────►
    GrammarMatcher      one of the answers that follow it

A compiled grammar has taken a step, because an expression may be small and its automaton huge: such
a grammar is refused here, before anything is computed for its request. While the model computes a
token's logits, the grammar's process computes their mask.
"""

from __future__ import annotations

import hashlib
import math
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from importlib.util import find_spec

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.engine.guided import frames, limits
from prfaas.engine.guided.description import MAX_CHARACTERS, GrammarDescription
from prfaas.engine.guided.frames import Begin, Begun, Compile, Compiled, End, Mask, Setup, Step
from prfaas.engine.guided.host_process import HostCopy, HostProcess
from prfaas.engine.guided.limits import MEMORY_BYTES, STEP_CPU_S, compile_cpu_s
from prfaas.errors import EngineError, InputError
from prfaas.service.cores import cpu_clock, leave_to_others
from prfaas.types import NotNow

MAX_CACHED = 32  # compiled grammars, whether a request uses them or not
MAX_CACHED_CHARACTERS = 1 << 20  # of their descriptions
MAX_REFUSED = 1024  # grammars whose limits are known to be too small
REFUSED_S = 600.0  # that this is known: a step may have taken long because of the other answers
# Of all grammars that are cached or used.
MAX_PROCESSES = 128
MAX_BYTES = 2 << 30
# The kernel's limits are of processor time. These are for a machine that has none to give.
COMPILE_S = 30.0
MASK_S = 10.0
RETRY_S = 1.0
_LOOK_MS = 20
_BEGUN = msgspec.msgpack.Decoder(Begun)
_COMPILED = msgspec.msgpack.Decoder(Compiled)
_MASK = msgspec.msgpack.Decoder(Mask)


class GrammarConnection:
    """To the process of one grammar, which ends with the last reference to this object."""

    def __init__(self, copy: HostCopy) -> None:
        connection = copy.connection
        self._host = copy.host
        self._socket = connection
        self._was_late = False
        self._lock = threading.Lock()
        self._due: dict[int, int] = {}  # masks that have not arrived, by matcher
        self._masks: dict[int, Mask] = {}  # the latest one of each
        self._matchers = 0
        self._ended: deque[int] = deque()  # matchers that are used no more
        self.memory_bytes = 0
        self.close = weakref.finalize(self, connection.close)
        self.close.atexit = False

    def compile(self, description: GrammarDescription) -> str | None:
        """What is wrong with the grammar; empty: nothing. None: its process has ended."""
        self._socket.settimeout(COMPILE_S)
        asked = Compile(
            description.kind,
            description.text,
            description.any_whitespace,
            description.whitespace_pattern,
        )
        process: int | None = None
        compiled: Compiled | None = None
        try:
            frames.send(self._socket, asked)
            begun = frames.receive(self._socket, _BEGUN)
            if begun is not None:
                process = self._opened(begun.pid)
                self._wait_with_patience(begun.pid)
            compiled = frames.receive(self._socket, _COMPILED)
        except TimeoutError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None
        finally:
            if process is not None:
                if compiled is None:  # nothing else would end it before its limits
                    _kill(process)
                os.close(process)
        if compiled is None:
            return None
        self._socket.settimeout(MASK_S)
        self.memory_bytes = compiled.memory_bytes
        return compiled.problem

    def _opened(self, pid: int) -> int | None:
        """A descriptor of the grammar's process; None when it has ended. It cannot be of another
        process, which has the number since then: the grammar's own still has its socket."""
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return None
        if self.is_alive:
            return process
        os.close(process)
        return None

    def _wait_with_patience(self, pid: int) -> None:
        """Until the grammar is compiled, or has turned out to be an expensive one, which takes from
        now on only what others leave: the engine, and grammars that are compiled at once."""
        until_s = time.monotonic() + COMPILE_S
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            try:
                if limits.is_expensive(time.clock_gettime(cpu_clock(pid))):
                    niceness = os.getpriority(os.PRIO_PROCESS, pid) + limits.NICENESS
                    leave_to_others(pid, niceness)
                    return
            except OSError:
                return  # it has ended, which the socket tells
            if time.monotonic() > until_s:
                raise TimeoutError

    @property
    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    @property
    def has_exceeded_limits(self) -> bool:
        """Its process has ended, and not with the host or for a late answer."""
        return not self.is_alive and not self._was_late and self._host.poll() is None

    def begin(self) -> int:
        with self._lock:
            self._matchers += 1
            self._send(Begin(self._matchers))
            return self._matchers

    def step(self, matcher: int, token: int) -> None:
        with self._lock:
            self._send(Step(matcher, token))

    def has_mask(self, matcher: int, within_s: float) -> bool:
        """Of the matcher's last step, or a reason why there is none."""
        until_s = time.monotonic() + within_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        with self._lock:
            while self._due[matcher]:
                left_s = max(0.0, until_s - time.monotonic())
                if not poll.poll(math.ceil(1e3 * left_s)):
                    return False
                try:
                    self._receive()
                except EngineError:
                    return True  # `mask` raises it again
            return True

    def mask(self, matcher: int) -> Mask:
        """After the matcher's last step. Waits for it."""
        with self._lock:
            while self._due[matcher]:
                self._receive()
            return self._masks[matcher]

    def end(self, matcher: int) -> None:
        """The garbage collector may call it in the middle of anything, so it takes no lock."""
        self._ended.append(matcher)

    def _send(self, request: Begin | Step) -> None:
        self._due[request.matcher] = self._due.get(request.matcher, 0) + 1
        try:
            while self._ended:
                ended = self._ended.popleft()
                self._due.pop(ended, None)
                self._masks.pop(ended, None)
                frames.send(self._socket, End(ended))
            frames.send(self._socket, request)
        except OSError:
            raise self._lost() from None

    def _receive(self) -> None:
        try:
            mask = frames.receive(self._socket, _MASK)
        except TimeoutError:
            self._was_late = True
            mask = None
        except (OSError, msgspec.MsgspecError):
            mask = None
        if mask is None:
            raise self._lost()
        self.memory_bytes = mask.memory_bytes
        if mask.matcher in self._due:
            self._due[mask.matcher] -= 1
            self._masks[mask.matcher] = mask

    def _lost(self) -> EngineError:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # what arrives later is not read
        except OSError:
            pass  # the other process has ended
        return EngineError("a step of the answer's grammar takes too much time or memory")


class GrammarMatcher:
    """Follows one answer. Used by one thread at a time."""

    def __init__(
        self,
        connection: GrammarConnection,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
    ) -> None:
        self._connection = connection
        self._ends = eos_token_ids | stop_token_ids
        # The library knows the others as ends.
        self._more_ends = np.array(sorted(stop_token_ids - eos_token_ids), dtype=np.int64)
        self._ended = False
        self._number = connection.begin()
        weakref.finalize(self, connection.end, self._number).atexit = False

    def is_ready(self, within_s: float) -> bool:
        return self._ended or self._connection.has_mask(self._number, within_s)

    def allowed_bits(self) -> npt.NDArray[np.uint8] | None:
        if self._ended:
            return None
        mask = self._connection.mask(self._number)
        if mask.problem:
            raise EngineError(f"the answer cannot follow its grammar: {mask.problem}")
        bits = np.frombuffer(mask.bits, dtype=np.uint8)
        if not len(self._more_ends):
            return bits
        allowed = np.unpackbits(bits, bitorder="little")
        allowed[self._more_ends] = mask.is_accepting
        return np.packbits(allowed, bitorder="little")

    def consume(self, token: int) -> None:
        """The next mask is computed from now on. It says whether the grammar allows the token."""
        if self._ended:
            return
        if token in self._ends:
            self._ended = True
            return
        self._connection.step(self._number, token)


class CompiledGrammar:
    """Immutable; any thread may ask for a matcher."""

    def __init__(self, connection: GrammarConnection, ends: frozenset[int], field: str) -> None:
        self._connection = connection
        self._ends = ends
        self.field = field

    def __repr__(self) -> str:
        return f"CompiledGrammar(field={self.field!r})"

    @property
    def is_alive(self) -> bool:
        """Its process has not ended."""
        return self._connection.is_alive

    @property
    def has_exceeded_limits(self) -> bool:
        """Its process has ended because of a step."""
        return self._connection.has_exceeded_limits

    def matcher(self, stop_token_ids: frozenset[int] = frozenset()) -> GrammarMatcher:
        return GrammarMatcher(self._connection, self._ends, stop_token_ids)

    def of_field(self, field: str) -> CompiledGrammar:
        """The same grammar, requested with another field."""
        return CompiledGrammar(self._connection, self._ends, field)


class GrammarCompiler:
    """For one model. Any thread may use it. Close it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer_json`: the text of tokenizer.json. `vocab_size`: of the tokenizer or of the
        model's logits, whichever is larger; a grammar does not allow rows of the logits that are
        not tokens. Raises ModuleNotFoundError."""
        if find_spec("llguidance") is None:
            raise ModuleNotFoundError("llguidance is not installed", name="llguidance")
        self._ends = eos_token_ids
        self._host = HostProcess(Setup(tokenizer_json, vocab_size, sorted(eos_token_ids)))
        self._lock = threading.Lock()  # for the rest
        self._cache: OrderedDict[tuple[str, ...], CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._living: weakref.WeakSet[GrammarConnection] = weakref.WeakSet()

    @property
    def host_pid(self) -> int | None:
        return self._host.pid

    def start(self) -> None:
        """Takes seconds for a large vocabulary. Otherwise the first grammar waits for it. Raises
        `EngineError`, and `InputError` when the library does not support the vocabulary."""
        self._host.start()

    def close(self) -> None:
        """Ends all processes."""
        self._host.close()
        with self._lock:
            self._cache.clear()

    def known(self, description: GrammarDescription) -> CompiledGrammar | None:
        """The grammar, if it is compiled. InputError when it is known to be too complex."""
        with self._lock:
            digest = _digest(description)
            if digest in self._refused:
                if time.monotonic() < self._refused[digest]:
                    raise _too_complex(description)
                del self._refused[digest]
            found = self._cache.get(description.key)
            if found is None:
                return None
            if not found.is_alive:
                del self._cache[description.key]
                if found.has_exceeded_limits:
                    self._refuse(description)
                    raise _too_complex(description)
                return None
            self._cache.move_to_end(description.key)
            return found.of_field(description.field)

    def compile(self, description: GrammarDescription) -> CompiledGrammar | NotNow:
        """InputError names the field of the request; EngineError: there is no process for it."""
        if len(description.text) > MAX_CHARACTERS:
            raise InputError(
                f"{len(description.text)} characters are more than {MAX_CHARACTERS}",
                where=description.field,
                fix="use a smaller schema, expression or grammar",
            )
        known = self.known(description)
        if known is not None:
            return known
        with self._lock:
            if not self._make_room():
                return NotNow("the grammars of other requests take all memory", RETRY_S)
        made = CompiledGrammar(self._connected(description), self._ends, description.field)
        with self._lock:
            self._keep(description.key, made)
        return made

    def _connected(self, description: GrammarDescription) -> GrammarConnection:
        try:
            connection = self._compiled(description) or self._compiled(description, again=True)
            assert connection is not None
            return connection
        except TimeoutError:
            raise InputError(
                f"compiling took longer than {COMPILE_S:.0f} s",
                where=description.field,
                fix="use a smaller schema, expression or grammar",
            ) from None

    def _compiled(
        self, description: GrammarDescription, *, again: bool = False
    ) -> GrammarConnection | None:
        """None: the host has ended, with all its copies."""
        try:
            copy = self._host.copy()
        except InputError as error:
            raise InputError(error.problem, where=description.field, fix=error.fix) from None
        connection = GrammarConnection(copy)
        with self._lock:
            self._living.add(connection)
        problem = None
        try:
            problem = connection.compile(description)
        finally:
            if problem != "":
                connection.close()
        if problem is None:
            if copy.host_has_ended():
                if again:
                    raise EngineError("the process that compiles grammars ends again and again")
                return None
            with self._lock:
                self._refuse(description)
            raise _too_complex(description)
        if problem:
            raise InputError(problem, where=description.field)
        return connection

    def _refuse(self, description: GrammarDescription) -> None:
        """For some time, without another process."""
        digest = _digest(description)
        self._refused[digest] = time.monotonic() + REFUSED_S
        self._refused.move_to_end(digest)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _make_room(self) -> bool:
        """False when grammars in use take all processes, or all memory."""
        while not self._has_room():
            if not self._cache:
                return False
            self._cache.popitem(last=False)
        return True

    def _has_room(self) -> bool:
        living = list(self._living)
        return len(living) < MAX_PROCESSES and (
            sum(connection.memory_bytes for connection in living) + MEMORY_BYTES <= MAX_BYTES
        )

    def _keep(self, key: tuple[str, ...], grammar: CompiledGrammar) -> None:
        self._cache[key] = grammar
        while (
            len(self._cache) > MAX_CACHED
            or sum(len(text) for _, text, *_ in self._cache) > MAX_CACHED_CHARACTERS
        ):
            self._cache.popitem(last=False)


def _kill(process: int) -> None:
    """By its descriptor."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)


def _digest(description: GrammarDescription) -> bytes:
    return hashlib.sha256(repr(description.key).encode(errors="surrogatepass")).digest()


def _too_complex(description: GrammarDescription) -> InputError:
    return InputError(
        f"it is too complex: it takes more than {compile_cpu_s(len(description.text)):.1f} s of a "
        f"processor to compile, {STEP_CPU_S} s for a step, or {MEMORY_BYTES >> 20} MiB",
        where=description.field,
        fix="use fewer or shorter rules",
    )
