"""A client whose process is stopped for a moment, with the event loop that the services use."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

TIMEOUT_S = 5.0
CLIENT = """
import asyncio, sys, uvloop
from prfaas.http_client.client import open_client

async def main(url, timeout_s):
    async with open_client() as http:
        print((await http.request("GET", url, timeout_s=timeout_s)).decode())

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1], float(sys.argv[2])))
"""


def _state(pid: int) -> str:
    """S for a process that waits, T for one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_response_that_arrived_in_a_pause_is_read() -> None:
    """A process that is continued returns from its wait without events, and uvloop then runs the
    timers that are due before it looks for events again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        command = [sys.executable, "-c", CLIENT, url, str(TIMEOUT_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                connection, _ = server.accept()
                with connection:
                    received = b""
                    while not received.endswith(b"\r\n\r\n"):
                        received += connection.recv(1 << 16)
                    arrived_s = time.monotonic()
                    wait_until(lambda: _state(client.pid) == "S")
                    client.send_signal(signal.SIGSTOP)
                    wait_until(lambda: _state(client.pid) == "T")
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
                    # The fault itself: less than a second over the timeout.
                    time.sleep(max(0.0, arrived_s + TIMEOUT_S + 0.2 - time.monotonic()))
                    client.send_signal(signal.SIGCONT)
                    assert client.communicate(timeout=PATIENCE_S)[0] == "hello\n"
            finally:
                client.kill()
