"""A client cannot fill the gateway's log with tracebacks."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

import pytest

from tests.gateway.api.api_server import api_server

MALFORMED = {
    "an impossible length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: "
    + b"9" * 30
    + b"\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("problem", MALFORMED)
async def test_a_malformed_request_is_one_short_line_of_the_log(
    problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with api_server() as server:
        parts = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(MALFORMED[problem])
        assert (await reader.read(-1)).startswith(b"HTTP/1.0 400")
        writer.close()
        await writer.wait_closed()
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert record.exc_info is None and record.levelno == logging.WARNING
    assert "\n" not in record.getMessage() and len(record.getMessage()) < 1_000
