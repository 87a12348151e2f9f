"""Compiles one grammar in a process of its own, because the library overflows its stack on long
chains of rules, which ends the process.

    python -m prfaas.engine.guided.trial < the library's form of a grammar

The vocabulary is that of bytes, the stack a quarter of a usual thread's, and memory is limited: a
grammar that passes here does not end a node.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

from prfaas.interpreter import module_command

# Shorter ones cannot have chains that are long enough: most requests need no trial.
MIN_CHARACTERS = 2000
TRIAL_S = 20.0
_CPU_S = 5  # does not depend on what else the host does
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 2 << 30


def passes(source: str) -> bool:
    """Whether the grammar compiles, or is refused, within the limits of time and memory. Takes as
    long as a Python process to start, and more for a large grammar."""
    command = module_command("prfaas.engine.guided.trial")
    try:
        done = subprocess.run(
            command,
            input=source.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer

    from prfaas.engine.guided.limits import LIMITS

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = sys.stdin.buffer.read().decode()

    def compile_and_copy() -> None:
        matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=compile_and_copy)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
