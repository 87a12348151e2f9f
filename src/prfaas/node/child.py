"""A kvd of the node's own: started before the engine registers, ended with the node."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prfaas.errors import InputError
from prfaas.node.process import KvdPlace

END_S = 10.0  # for a kvd to end what it is doing


@contextmanager
def child_kvd(options: Sequence[str]) -> Iterator[KvdPlace]:
    """`prfaas kvd` with these options, in a process of its own. What it logs goes where the node's
    log goes; it also ends when the node is killed, because its standard input then does."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        socket = Path(folder) / "kvd.sock"
        command = [sys.executable, "-m", "prfaas", "kvd", "--socket", str(socket), *options]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield KvdPlace(str(socket), _url(process))
            finally:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        for word in line.split():
            if word.startswith("http://"):
                return word
    raise InputError("the kvd did not start", fix="its own message says why")
