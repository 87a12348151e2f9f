"""Requests nobody should send: refused with a reason, in bounded memory; the next one is served."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.gateway.api.schemas import Schemas
from tests.waiting import HANG_S, PATIENCE_S

BODY_MB = 4
SOON_S = 1.0  # what comes slowly on purpose is given up after this
GENERATING = ["/v1/completions", "/v1/chat/completions"]
POSTED = [*GENERATING, "/prfaas/v1/explain", "/prfaas/v1/register"]
MANY = settings(max_examples=40, suppress_health_check=list(HealthCheck))


class Victim:
    """A front in another process."""

    def __init__(self, patience_s: float) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.api.child", str(BODY_MB), str(patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._popen.stdout is not None
        host, port = self._popen.stdout.readline().rpartition("http://")[2].strip().split(":")
        self.address = (host, int(port))

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=HANG_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status == 200:
            return 200, said
        return answer.status, json.loads(said)["error"]

    def is_well(self) -> bool:
        return self.post("/v1/completions", b'{"prompt": [1], "max_tokens": 1}')[0] == 200

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self._popen.communicate()  # the end of its input ends it
        assert self._popen.returncode == 0


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    victim = Victim(PATIENCE_S)
    yield victim
    assert victim.is_well()
    victim.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Victim]:
    victim = Victim(SOON_S)
    yield victim
    victim.close()


@pytest.fixture(scope="module")
def schemas(victim: Victim) -> Schemas:
    connection = http.client.HTTPConnection(*victim.address, timeout=HANG_S)
    connection.request("GET", "/openapi.json")
    document = json.load(connection.getresponse())
    connection.close()
    return Schemas(document)


def refused(status: int, error: Any) -> None:
    assert 400 <= status < 500, (status, error)
    assert error["message"] and error["type"] == "invalid_request_error" and error["code"]


# From the published document ----------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTED)
def test_what_the_document_allows_is_answered_as_it_says(
    victim: Victim, schemas: Schemas, path: str
) -> None:
    @MANY
    @given(schemas.values(schemas.body_of(path)))
    def check(body: dict[str, Any]) -> None:
        if path in GENERATING:  # answers as long as the model may give are not what is looked at
            body = {**body, "model": "made-up", "max_tokens": 2}
            body.pop("max_completion_tokens", None)
        status, error = victim.post(path, json.dumps(body).encode())
        assert status in schemas.documented(path)
        if status != 200:
            refused(status, error)

    check()


@pytest.mark.parametrize("path", POSTED)
def test_what_the_document_nearly_allows_has_a_reason(
    victim: Victim, schemas: Schemas, path: str
) -> None:
    @MANY
    @given(schemas.nearly(schemas.body_of(path)))
    def check(body: dict[str, Any]) -> None:
        if path in GENERATING and not body.get("max_completion_tokens"):
            body = {"max_tokens": 2, **body}
        status, error = victim.post(path, json.dumps(body).encode())
        assert status in schemas.documented(path)
        if status != 200:
            refused(status, error)

    check()


def test_a_good_request_fits_the_document(victim: Victim, schemas: Schemas) -> None:
    """The other way round: the strategies do reach what is served."""
    assert set(GENERATING) <= set(schemas.document["paths"])
    served = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [CHAT]}}
    for path, body in served.items():
        assert victim.post(path, json.dumps({**body, "max_tokens": 1}).encode())[0] == 200


CHAT = {"role": "user", "content": "x"}


# Bytes --------------------------------------------------------------------------------------------


@MANY
@given(st.binary(max_size=60), st.sampled_from(POSTED))
@example(b"", "/v1/completions")
@example(b"null", "/v1/completions")
@example(b"[]", "/v1/chat/completions")
@example(b"{}", "/prfaas/v1/explain")
@example(b'{"prompt": NaN}', "/v1/completions")
@example(b'{"prompt": "x", "temperature": NaN}', "/v1/completions")
@example(b'{"prompt": "x", "temperature": 1e999}', "/v1/completions")
@example(b'{"prompt": "\xff\xfe"}', "/v1/completions")
@example(b'{"prompt": "x", "user": "\xff"}', "/v1/completions")
@example(b'{"\xff": 1}', "/v1/completions")
@example(b'{"prompt": "\\ud800"}', "/v1/completions")
@example(b'{"prompt": [1' + b"0" * 5000 + b"]}", "/v1/completions")
@example(b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "/v1/completions")
@example(b'{"prompt": "x", "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "/v1/completions")
@example(b'{"messages": ' + b'[{"a":' * 50_000 + b"1" + b"}]" * 50_000 + b"}", POSTED[1])
def test_bytes_that_are_no_request(victim: Victim, body: bytes, path: str) -> None:
    refused(*victim.post(path, body))


def test_a_template_cannot_be_led_astray(victim: Victim) -> None:
    nested: Any = "x"
    for _ in range(400):
        nested = [nested]
    for content in (nested, {"a": 1}, [{"type": ["text"]}, 7], [{"type": "text", "text": 1}]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        refused(*victim.post("/v1/chat/completions", json.dumps(body).encode()))


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
    ],
)
def test_what_is_not_http_is_a_400(victim: Victim, raw: bytes) -> None:
    with socket.create_connection(victim.address, timeout=HANG_S) as client:
        try:
            client.sendall(raw)
            said = client.recv(4096)
        except ConnectionError:  # it may have hung up on the rest
            return
    assert said == b"" or said.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), said


# Size and time ------------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large_is_not_read(victim: Victim) -> None:
    with socket.create_connection(victim.address, timeout=HANG_S) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def pour(victim: Victim) -> int:
    """A body without an end, as fast as it is taken. How much was."""
    sent = 0
    with socket.create_connection(victim.address, timeout=HANG_S) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        chunk = b"%x\r\n" % 100_000 + b" " * 100_000 + b"\r\n"
        try:
            while sent < 50 * BODY_MB * 1_000_000:
                client.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            pass
    return sent


def test_memory_is_bounded_whatever_is_sent(victim: Victim) -> None:
    largest = json.dumps({"prompt": "x" * (BODY_MB * 1_000_000 - 100)}).encode()
    with ThreadPoolExecutor(6) as threads:

        def flood() -> None:
            told = list(threads.map(lambda _: victim.post("/v1/completions", largest), range(12)))
            # Too long for the model, or one too many at once.
            assert {status for status, _ in told} <= {400, 503}
            list(threads.map(lambda _: pour(victim), range(6)))

        flood()  # what an allocator keeps for next time is kept once
        before = victim.rss_bytes()
        for _ in range(2):
            flood()
    assert victim.rss_bytes() - before < 10 * BODY_MB * 1_000_000
    assert victim.is_well()


def test_slow_bodies_are_given_up(impatient: Victim) -> None:
    with socket.create_connection(impatient.address, timeout=HANG_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_slow_heads_are_given_up(impatient: Victim, sent: bytes) -> None:
    with socket.create_connection(impatient.address, timeout=HANG_S) as client:
        client.sendall(sent)
        assert client.recv(4096) == b""  # closed, by the other side
