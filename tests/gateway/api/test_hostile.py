"""Invalid and abusive requests: refused with a reason, in bounded memory, and the next request is
served."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_S, PATIENCE_S

BODY_MB = 4
SOON_S = 1.0  # the time limit of the server that gets slow requests
GENERATING = ["/v1/completions", "/v1/chat/completions"]
LONG_BODIES = [*GENERATING, "/prfaas/v1/explain", "/prfaas/v1/register"]


class Server:
    """The API server in another process."""

    def __init__(
        self, patience_s: float, body_mb: float = BODY_MB, *, descriptors: int = 0
    ) -> None:
        """`descriptors`: that it may have; 0: as many as this process."""
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.gateway.api.server_process",
                str(body_mb),
                str(patience_s),
                str(descriptors),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._popen.stdout is not None
        host, port = self._popen.stdout.readline().rpartition("http://")[2].strip().split(":")
        self.address = (host, int(port))

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=HANG_S)
        try:
            headers = {"Content-Type": "application/json", **headers}
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status == 200:
            return 200, data
        return answer.status, json.loads(data)["error"]

    def is_well(self) -> bool:
        return self.post("/v1/completions", b'{"prompt": [1], "max_tokens": 1}')[0] == 200

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_rss_bytes(self) -> int:
        status = Path(f"/proc/{self._popen.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def close(self) -> None:
        self._popen.communicate()  # the process ends when its standard input is closed
        assert self._popen.returncode == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(PATIENCE_S)
    yield server
    assert server.is_well()
    server.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    server = Server(SOON_S)
    yield server
    server.close()


def check_refused(status: int, error: Any) -> None:
    assert 400 <= status < 500, (status, error)
    assert error["message"] and error["type"] == "invalid_request_error" and error["code"]


# Bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (0, b""),
        (0, b"null"),
        (1, b"[]"),
        (0, b'{"prompt": "x", "temperature": 1e999}'),
        (0, b'{"prompt": "\xff\xfe"}'),
        (0, b'{"prompt": "x", "user": "\xff"}'),
        (0, b'{"\xff": 1}'),
        (0, b'{"prompt": "\\ud800"}'),
        (0, b'{"prompt": [1' + b"0" * 5000 + b"]}"),
        (0, b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}"),
        (0, b'{"prompt": "x", "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        (1, b'{"messages": ' + b'[{"a":' * 50_000 + b"1" + b"}]" * 50_000 + b"}"),
    ],
    ids=range(12),
)
def test_bytes_that_are_not_a_request(server: Server, path: int, body: bytes) -> None:
    check_refused(*server.post(GENERATING[path], body))


LONG = 1_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (0, b'{"prompt": [' + b"1" * LONG + b"]}"),
        (0, b'{"prompt": [-' + b"1" * LONG + b"]}"),
        (0, b'{"prompt": [1], "seed": ' + b"1" * LONG + b"}"),
        (0, b'{"prompt": [1], "temperature": NaN, "user": "' + b"x" * LONG + b'"}'),
        (0, b'{"prompt": "' + b"x" * LONG + b'\xff"}'),
        (0, b'{"prompt": [1], "user": "' + b"x" * LONG + b'\xff"}'),
        (0, b'{"prompt": "x", "a": ' + b"[" * LONG + b"]" * LONG + b"}"),
        (0, b'{"prompt": [1], "x": [' + b"[]," * LONG + b"[]]}"),
        (0, b'{"prompt": [1], ' + b'"a":1,' * LONG),
        (0, b"[" * LONG),
        (0, b'{"prompt": [1' + b",1" * LONG + b"]}"),
        (1, b'{"messages": [{"role": "user", "content": ' + b"1" * LONG + b"}]}"),
        (1, b'{"messages": [{"role": "user", "content": "' + b"x" * LONG + b'\xff"}]}'),
        (1, b'{"messages": ' + b'[{"a":' * (LONG // 8) + b"1" + b"}]" * (LONG // 8) + b"}"),
        (1, b'{"messages": [' + b'{"role":"user"},' * (LONG // 16) + b"{}]}"),
    ],
    ids=range(15),
)
def test_long_bodies_that_are_not_a_request_get_a_reason(
    server: Server, path: int, body: bytes
) -> None:
    check_refused(*server.post(GENERATING[path], body))


GOOD = b'{"prompt": [1], "max_tokens": 1}'


@pytest.mark.parametrize("path", LONG_BODIES)
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(GOOD)[:-9]),
        ("gzip", gzip.compress(GOOD) + b"more"),
        ("gzip", gzip.compress(os.urandom(200_000))[:-9]),
        ("deflate", b"not deflate"),
        ("deflate", zlib.compress(GOOD)[:-5]),
        ("br", GOOD),
        ("zstd", GOOD),
        ("x-unknown", GOOD),
        ("gzip, gzip", gzip.compress(gzip.compress(GOOD))),
    ],
    ids=[
        *("not-gzip", "cut-gzip", "more-than-gzip", "long-cut-gzip", "not-deflate", "cut-deflate"),
        *("br", "zstd", "unknown", "twice"),
    ],
)
def test_a_body_in_a_broken_or_unknown_content_encoding_gets_a_reason(
    server: Server, path: str, encoding: str, body: bytes
) -> None:
    status, error = server.post(path, body, **{"Content-Encoding": encoding})
    check_refused(status, error)
    assert "Content-Encoding" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
@pytest.mark.parametrize("spaces", [0, 300_000])
def test_compressed_bodies_are_served(server: Server, encoding: str, spaces: int) -> None:
    body = GOOD + b" " * spaces
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding](body)
    assert server.post("/v1/completions", packed, **{"Content-Encoding": encoding})[0] == 200


def test_a_body_that_is_too_large_when_decompressed_gets_413(server: Server) -> None:
    bomb = gzip.compress(b" " * (BODY_MB * 1_000_000 + 1))
    status, error = server.post("/v1/completions", bomb, **{"Content-Encoding": "gzip"})
    assert (status, error["code"]) == (413, "body_too_large")


def test_malformed_messages_are_refused(server: Server) -> None:
    nested: Any = "x"
    for _ in range(400):
        nested = [nested]
    for content in (nested, {"a": 1}, [{"type": ["text"]}, 7], [{"type": "text", "text": 1}]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        check_refused(*server.post("/v1/chat/completions", json.dumps(body).encode()))


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: [::1]\r\nX-Long: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
    ],
)
def test_data_that_is_not_http_gets_400(server: Server, raw: bytes) -> None:
    with socket.create_connection(server.address, timeout=HANG_S) as client:
        try:
            client.sendall(raw)
            data = client.recv(4096)
        except ConnectionError:  # the server may have closed the connection already
            return
    assert data == b"" or data.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), data


# Size and time ------------------------------------------------------------------------------------


def test_a_body_with_a_too_large_content_length_is_not_read(server: Server) -> None:
    with socket.create_connection(server.address, timeout=HANG_S) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {10**12}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def pour(server: Server) -> int:
    """Sends an endless body as fast as the server reads it. Returns the number of bytes sent."""
    sent = 0
    with socket.create_connection(server.address, timeout=HANG_S) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        chunk = b"%x\r\n" % 100_000 + b" " * 100_000 + b"\r\n"
        try:
            while sent < 50 * BODY_MB * 1_000_000:
                client.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            pass
    return sent


def test_memory_is_bounded_under_a_flood(server: Server) -> None:
    largest = json.dumps({"prompt": "x" * (BODY_MB * 1_000_000 - 100)}).encode()
    with ThreadPoolExecutor(6) as threads:

        def flood() -> None:
            answers = list(
                threads.map(lambda _: server.post("/v1/completions", largest), range(12))
            )
            # Too long for the model, or over the limit of all bodies.
            assert {status for status, _ in answers} <= {400, 503}
            list(threads.map(lambda _: pour(server), range(6)))

        flood()  # the allocator keeps memory after the first flood
        before = server.rss_bytes()
        for _ in range(2):
            flood()
    assert server.rss_bytes() - before < 10 * BODY_MB * 1_000_000
    assert server.is_well()


def test_slow_bodies_time_out(impatient: Server) -> None:
    with socket.create_connection(impatient.address, timeout=HANG_S) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 50\r\n\r\n{"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nHost: [::1]\r\n"]
)
def test_slow_headers_time_out(impatient: Server, sent: bytes) -> None:
    with socket.create_connection(impatient.address, timeout=HANG_S) as client:
        client.sendall(sent)
        assert client.recv(4096) == b""  # closed by the server


# Flood of long bodies -----------------------------------------------------------------------------


@pytest.mark.slow
def test_long_bodies_do_not_grow_the_gateway() -> None:
    """They are held outside the process that streams, and are parsed by another process."""
    server = Server(PATIENCE_S, body_mb=64.0)
    try:
        assert server.is_well()
        before = server.peak_rss_bytes()
        size = 60_000_000
        bodies = [
            b'{"prompt": [1], "x": [' + b"[]," * (size // 3) + b"[]]}",
            b'{"prompt": [1], "x": ' + b"[" * size,
            b'{"prompt": [' + b"1" * size + b"]}",
            b'{"prompt": [1], "x": ' + b"1" * size + b"}",
            b'{"prompt": "' + b"x" * size + b'"}',
        ]
        with ThreadPoolExecutor(3) as threads:
            for status, error in threads.map(
                lambda body: server.post("/v1/completions", body), bodies
            ):
                check_refused(status, error)
        assert server.peak_rss_bytes() - before < 100_000_000
        assert server.is_well()
    finally:
        server.close()


@pytest.mark.slow
def test_streams_are_unharmed_while_clients_send_hostile_bodies() -> None:
    """The benchmark with small figures; its lag is not judged here, on a busy machine."""
    script = Path(__file__).parents[3] / "bench" / "hostile_bodies.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "3", "--clients", "3", "--size", "6000000"],
        capture_output=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert found["held"]["streams"] and found["held"]["memory"], found
    assert found["answers"] and not any(": 500" in answer for answer in found["answers"]), found


# Connections -------------------------------------------------------------------------------------


def test_idle_connections_of_one_address_lock_no_other_client_out() -> None:
    server = Server(HANG_S, descriptors=256)
    idle = [socket.create_connection(server.address, PATIENCE_S) for _ in range(400)]
    try:
        connection = http.client.HTTPConnection(
            *server.address, timeout=PATIENCE_S, source_address=("127.0.0.2", 0)
        )
        body = b'{"prompt": [1], "max_tokens": 1}'
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["object"]) == (200, "text_completion")
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
    finally:
        for one in idle:
            one.close()
        server.close()
    closed = re.search(r'closed_connections_total{reason="address"} (\d+)', page)
    assert closed is not None and int(closed[1]) >= 400 - 96 / 2
