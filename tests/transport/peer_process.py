"""A sender or a receiver in a separate process, for tests that kill it.

python -m tests.transport.peer_process receive
python -m tests.transport.peer_process send HOST PORT GRANT_JSON NBYTES
"""

from __future__ import annotations

import sys

import msgspec

from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.types import Grant
from tests.transport.ends import Owner


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def receive() -> None:
    with Listener() as listener:
        print_line(f"{listener.address[0]} {listener.address[1]}")
        for line in sys.stdin:
            listener.expect(msgspec.json.decode(line, type=Grant), Owner())
            print_line("expected")


def send(host: str, port: str, grant: str, nbytes: str) -> None:
    """Sends the first of two segments and then waits until the test kills the process."""
    half = int(nbytes) // 2
    options = LinkOptions(connections=2, frame_bytes=64 << 10, quantum_bytes=64 << 10)
    with TransferLink((host, int(port)), options=options) as link:
        transfer = link.open(
            msgspec.json.decode(grant, type=Grant), {"first": half, "second": half}
        )
        transfer.ready("first", memoryview(bytes(half)))
        transfer.done.result(600)


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
