"""Services whose log nobody reads, or whose disk is full, answer, and end when they are told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.hosts import START_S, call, text_of
from tests.service.services import SERVICES, running
from tests.waiting import wait_until


@pytest.fixture
def full_disk() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def stalled_reader() -> Iterator[int]:
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


def dropped(url: str) -> float:
    """The lines that the service could not write, as its metrics have them."""
    found = re.findall(r"^prfaas_log_dropped_lines_total (\S+)$", text_of(f"{url}/metrics"), re.M)
    return float(found[0])


def answers_and_ends(process: subprocess.Popen[str], url: str) -> None:
    for _ in range(100):
        assert call("GET", f"{url}/live")[0] == 200
    process.terminate()
    assert process.wait(START_S) == 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_answers_although_nobody_reads_its_log(
    tmp_path: Path, stalled_reader: int, service: str
) -> None:
    with running(service, tmp_path, stalled_reader) as (process, url):
        process.send_signal(signal.SIGHUP)  # it logs what it has read again
        assert dropped(url) >= 0.0
        answers_and_ends(process, url)


def test_a_service_answers_on_a_full_disk_and_counts_the_lines(
    tmp_path: Path, full_disk: int
) -> None:
    with running("kvd", tmp_path, full_disk) as (process, url):
        before = dropped(url)
        process.send_signal(signal.SIGHUP)  # it logs what it has read again
        wait_until(lambda: dropped(url) > before)
        answers_and_ends(process, url)
