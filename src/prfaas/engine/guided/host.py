"""The process that has the vocabulary, and copies itself for each grammar.

    python -P -m prfaas.engine.guided.host DESCRIPTOR

A grammar is text of a stranger, and the library's own limits do not bound all of its work: an
automaton may take hours and all memory, a chain of rules overflows the stack. So each grammar has a
process, a copy (`os.fork`) of this one, with limits of processor time and memory that the kernel
enforces. A copy needs no imports and no vocabulary, and starts within milliseconds. It compiles its
grammar, and computes the masks of all answers that follow it. It ends with its socket; and with
this process, which ends with the node. This module alone imports llguidance.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance import grammar_from as convert_grammar

from prfaas.engine.guided import frames, limits
from prfaas.engine.guided.frames import (
    Begin,
    Begun,
    Compile,
    Compiled,
    End,
    Mask,
    Ready,
    Setup,
    Step,
)
from prfaas.service.cores import leave_to_others

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A step of a hostile grammar takes up to 0.4 s with these, and 2.6 s with llguidance's own limits.
# A lexer's state takes about 1.5 kB, in each sequence.
LIBRARY_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHOWN = 300  # characters of a library's message
_MEMORY_EVERY = 64  # masks
_SETUP = msgspec.msgpack.Decoder(Setup)
_COMPILE = msgspec.msgpack.Decoder(Compile)
_REQUEST: msgspec.msgpack.Decoder[frames.Request] = msgspec.msgpack.Decoder(frames.Request)


def main() -> None:
    # A terminal and systemd send these to all processes; the node drains first.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets copies that have ended
    with socket.socket(fileno=int(sys.argv[1])) as control, suppress(ConnectionError):
        _host(control)


def _host(control: socket.socket) -> None:
    """Makes a copy of this process for every connection that the node sends. Returns, or raises
    ConnectionError, when the node has ended."""
    setup = frames.receive(control, _SETUP)
    if setup is None:
        return
    ends = sorted(setup.eos_token_ids)
    try:
        tokenizer = LLTokenizer(setup.tokenizer_json, n_vocab=setup.vocab_size, eos_token=ends)
    except ValueError as error:
        frames.send(control, Ready(shown(str(error)) or "it cannot be read"))
        return
    frames.send(control, Ready())
    del setup
    gc.collect()
    gc.freeze()  # copies share its memory
    libc = ctypes.CDLL(None)
    here = os.getpid()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork():
            os.close(descriptors[0])
            continue
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == here:
            control.close()
            os.setsid()  # for `leave_to_others`
            _serve(socket.socket(fileno=descriptors[0]), tokenizer, frozenset(ends))
        os._exit(0)


def _serve(connection: socket.socket, tokenizer: LLTokenizer, ends: frozenset[int]) -> NoReturn:
    """All that a copy does. Nothing of it may end as an exception in `main`'s loop."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stderr.fileno())  # the library's last words have a stranger's text
        asked = frames.receive(connection, _COMPILE)
        if asked is not None:
            GrammarProcess(connection, tokenizer, ends).run(asked)
    except BaseException:
        os._exit(1)
    os._exit(0)


class GrammarProcess:
    def __init__(
        self, connection: socket.socket, tokenizer: LLTokenizer, ends: frozenset[int]
    ) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._ends = ends
        self._matchers: dict[int, LLMatcher] = {}
        self._steps = 0
        self._masks = 0
        self._base_bytes = _data_bytes()
        self._memory_bytes = 0

    def run(self, asked: Compile) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        frames.send(self._connection, Begun(os.getpid()))
        memory = self._base_bytes + limits.MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _allow(limits.compile_cpu_s(len(asked.text)))
        try:
            start = LLMatcher(self._tokenizer, _source(asked), log_level=0, limits=LIBRARY_LIMITS)
            problem = start.get_error() or self._problem_of_first_steps(start)
            if problem:
                problem = f"it is not valid, not supported or too complex: {shown(problem)}"
        except (ValueError, RecursionError) as error:
            problem = shown(str(error)) or "it is not valid"
        self._memory_bytes = _data_bytes() - self._base_bytes
        frames.send(self._connection, Compiled(self._memory_bytes, problem))
        if problem:
            return
        compiled_s = time.process_time()
        while (request := frames.receive(self._connection, _REQUEST)) is not None:
            _allow(limits.STEP_CPU_S)
            self._answer(request, start)
            spent_s = time.process_time() - compiled_s
            if spent_s > limits.SPARE_CPU_S + limits.MEAN_STEP_CPU_S * self._steps:
                return
            if limits.is_expensive(spent_s, self._steps):
                leave_to_others(0, niceness + limits.NICENESS)

    def _problem_of_first_steps(self, start: LLMatcher) -> str:
        """Computes the masks of the first step, which matchers then have, and of a second one:
        an expression may be small and its automaton huge."""
        token = _first_other(start.compute_bitmask(), self._ends)
        if token is None or start.is_error():
            return start.get_error()
        second = start.deep_copy()
        second.consume_token(token)
        second.compute_bitmask()
        return second.get_error()

    def _answer(self, request: frames.Request, start: LLMatcher) -> None:
        match request:
            case Begin(number):
                self._matchers[number] = start.deep_copy()
            case Step(number, token):
                self._matchers[number].consume_token(token)
                self._steps += 1  # of answers: one that only begins gains no time
            case End(number):
                self._matchers.pop(number, None)
                return
        matcher = self._matchers[number]
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        self._masks += 1
        if self._masks % _MEMORY_EVERY == 0:
            self._memory_bytes = _data_bytes() - self._base_bytes
        problem = shown(matcher.get_error()) if matcher.is_error() else ""
        accepting = not problem and matcher.is_accepting()
        frames.send(self._connection, Mask(number, bits, accepting, self._memory_bytes, problem))


def _allow(cpu_s: float) -> None:
    """The kernel ends this process when it uses more of a processor from now on."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # nothing handles its signal, SIGPROF


def _first_other(bits: bytes, left_out: frozenset[int]) -> int | None:
    """The first token whose bit is set."""
    for at, byte in enumerate(bits):
        for bit in range(8) if byte else ():
            if byte >> bit & 1 and 8 * at + bit not in left_out:
                return 8 * at + bit
    return None


def _source(asked: Compile) -> str:
    """The text that llguidance compiles. ValueError when it cannot be made."""
    text = asked.text
    match asked.kind:
        case "json":
            options: JsonCompileOptions = {"whitespace_flexible": asked.any_whitespace}
            if asked.whitespace_pattern is not None:
                options["whitespace_pattern"] = asked.whitespace_pattern
            return LLMatcher.grammar_from_json_schema(text, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
        case "grammar":
            return convert_grammar("grammar", text)
        case _:
            return LLMatcher.grammar_from_lark(text)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[5]) * resource.getpagesize()


def shown(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


if __name__ == "__main__":
    main()
