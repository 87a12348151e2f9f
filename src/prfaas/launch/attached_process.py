"""Processes that end with the process that started them, even when that one is killed."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prfaas.contracts.readiness import KvdReady, parse_readiness
from prfaas.errors import InputError
from prfaas.interpreter import module_command
from prfaas.node.process import KvdAddress

END_S = 10.0  # for a kvd to close, after it has drained
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


PROGRAM = "--program"  # before a command that is not a `prfaas` command
_UNINTERRUPTED = "--uninterrupted"  # before a command that Ctrl-C must not reach


def attached_prefix() -> list[str]:
    """The start of a command line. The arguments of a `prfaas` command follow it, or `PROGRAM` and
    another command line."""
    return module_command(__name__, str(os.getpid()))


@contextmanager
def starting_kvd(options: Sequence[str], drain_s: float) -> Iterator[Callable[[], KvdAddress]]:
    """Starts `prfaas kvd` with these options. The function waits until it is ready, so that the
    node can do other things meanwhile; call it once. The kvd's log goes where the node's log goes.
    It ends after the node, and not before its transfers have ended, or `drain_s` have passed: a
    prefill's state is still being sent when the node has answered."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        path = Path(folder) / "kvd.sock"
        # The node has waited already, so the kvd need not. Ctrl-C reaches all processes of a
        # terminal, but the kvd has to outlive the node.
        kvd = ["kvd", "--socket", str(path), "--set", "kvd.timeouts.leave_s=0", *options]
        command = [*attached_prefix(), _UNINTERRUPTED, *kvd]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield lambda: KvdAddress(str(path), _wait_until_ready(process).http, process.pid)
            finally:
                process.terminate()
                try:
                    process.wait(drain_s + END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait_until_ready(process: subprocess.Popen[str]) -> KvdReady:
    assert process.stdout is not None
    ready = parse_readiness(process.stdout.readline(), KvdReady)
    if ready is None:
        raise InputError("the node's kvd did not start", fix="see the message of the kvd above")
    return ready


def _run_attached(parent: int) -> None:
    """A killed parent cannot end its children, so the kernel does. This survives an exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    if sys.argv[1:2] == [_UNINTERRUPTED]:
        del sys.argv[1]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.argv[1:2] == [PROGRAM]:
        os.execvp(sys.argv[2], sys.argv[2:])
    runpy.run_module("prfaas", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_attached(int(sys.argv.pop(1)))
