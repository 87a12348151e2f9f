"""Services whose log nobody reads, or whose disk is full, answer, and end when they are told to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.hosts import START_S, call, text_of
from tests.service.services import SERVICES, running


@pytest.fixture(params=["stalled reader", "full disk"])
def errors(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
        yield descriptor
        os.close(descriptor)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_answers_although_its_log_cannot_be_written(
    tmp_path: Path, errors: int, service: str
) -> None:
    with running(service, tmp_path, errors) as (process, url):
        for _ in range(100):
            assert call("GET", f"{url}/live")[0] == 200
        assert "prfaas_log_dropped_lines_total" in text_of(f"{url}/metrics")
        process.terminate()
        assert process.wait(START_S) == 0
