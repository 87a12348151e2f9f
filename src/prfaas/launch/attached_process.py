"""Processes that end with the one that started them, however that ends; a node's own kvd is one."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prfaas.errors import InputError
from prfaas.node.process import KvdAddress

END_S = 10.0  # for a kvd to end what it is doing
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


PROGRAM = "--program"  # in front of a command that is not ours


def tether() -> list[str]:
    """Goes in front of the arguments of a `prfaas` command, or of `PROGRAM` and another command."""
    return [sys.executable, "-m", __name__, str(os.getpid())]


@contextmanager
def child_kvd(options: Sequence[str]) -> Iterator[KvdAddress]:
    """`prfaas kvd` with these options in a process of its own. It logs where the node logs."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        path = Path(folder) / "kvd.sock"
        command = [*tether(), "kvd", "--socket", str(path), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield KvdAddress(str(path), _url(process))
            finally:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    """From the line in which a kvd says that it is ready."""
    assert process.stdout is not None
    _, found, url = process.stdout.readline().rpartition("http ")
    if not found:
        raise InputError("the node's kvd did not start", fix="its own message is above")
    return url.strip()


def _run_as_child(parent: int) -> None:
    """Who is killed cannot end its children: the kernel does. That survives an exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("its parent has gone")
    if sys.argv[1:2] == [PROGRAM]:
        os.execvp(sys.argv[2], sys.argv[2:])
    runpy.run_module("prfaas", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_as_child(int(sys.argv.pop(1)))
