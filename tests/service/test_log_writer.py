"""Lines that cannot be written are dropped and counted, and nobody waits for them."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.service.log_writer import LogWriter
from tests.waiting import PATIENCE_S, wait_until

PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reader and writer of a short pipe. A reader that has nothing to read does not wait."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(reader, False)
    try:
        yield reader, writer
    finally:
        os.close(reader)  # ends a write that still waits
        os.close(writer)


def describe_loss(lines: int) -> bytes:
    return b"lost %d\n" % lines


def read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 20)
    except BlockingIOError:
        return b""


def read_until(reader: int, end: bytes) -> bytes:
    """What arrives up to this end."""
    found = b""

    def told() -> bool:
        nonlocal found
        found += read(reader)
        return found.endswith(end)

    wait_until(told)
    return found


@pytest.mark.parametrize("waits", [True, False], ids=["blocking", "non-blocking"])
def test_lines_beyond_the_bound_are_dropped_and_told(pipe: tuple[int, int], waits: bool) -> None:
    reader, descriptor = pipe
    os.set_blocking(descriptor, waits)
    writer = LogWriter(descriptor, describe_loss, most_lines=20)
    line = b"x" * 1000 + b"\n"
    for _ in range(100):
        writer.write(line)
    assert not writer.flush(0.0)
    # Those of the pipe, the one that is being written, and those of the queue.
    assert 100 - PIPE_BYTES // 1000 - 1 - 20 <= writer.dropped <= 80
    told = b"lost %d\n" % writer.dropped
    assert read_until(reader, told) == line * (100 - writer.dropped) + told
    writer.write(b"next\n")
    assert read_until(reader, b"next\n") == b"next\n"
    assert writer.flush(PATIENCE_S)


def test_the_bytes_of_waiting_lines_are_bounded(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1], describe_loss, most_bytes=10_000)
    writer.write(b"x" * 10_001)
    assert writer.dropped == 1
    for _ in range(100):
        writer.write(b"x" * 1000)
    assert writer.dropped >= 1 + 100 - 10 - PIPE_BYTES // 1000 - 1


def test_a_disk_that_is_full_for_a_while_costs_only_the_lines_of_that_time(tmp_path: Path) -> None:
    file = tmp_path / "log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        changing = os.dup(full)
        writer = LogWriter(changing, describe_loss, retry_s=0.001)
        for number in range(3):
            writer.write(b"%d\n" % number)
        assert writer.flush(PATIENCE_S)
        assert writer.dropped == 3
        os.dup2(descriptor, changing)  # there is room again; nothing else is logged
        wait_until(lambda: file.read_bytes() == b"lost 3\n")
        writer.write(b"3\n")
        assert writer.flush(PATIENCE_S)
        assert file.read_bytes() == b"lost 3\n3\n"
        os.close(changing)
    finally:
        os.close(full)
        os.close(descriptor)


CHILD = """
import logging, sys
from prfaas.service.logging import configure_logging, dropped_lines, flush_log
configure_logging("info", "json")
for number in range(int(sys.argv[1])):
    logging.info("line %d", number)
if "flush" in sys.argv:
    flush_log()
print(dropped_lines(), flush=True)
sys.stdin.read()
logging.info("the last one")
"""


@contextmanager
def child(lines: int, errors: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that logs to `errors`, says how many lines it has dropped, and ends when its input
    does. With the word `flush` it first waits until no line is left."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(lines), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_process_whose_log_nobody_reads_goes_on(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = 30_000
    with child(lines, writer) as process:
        dropped = int(first_line(process))
        assert 0 < dropped < lines
        loss = b'"event":"log","dropped":%d}\n' % dropped
        log = read_until(reader, loss).decode()
        assert len(re.findall(r'"line \d+"', log)) == lines - dropped
        process.communicate(timeout=PATIENCE_S)  # ends its input
        assert "the last one" in read(reader).decode()
        assert process.returncode == 0


def test_a_process_ends_although_nobody_reads_its_log(pipe: tuple[int, int]) -> None:
    with child(1000, pipe[1]) as process:
        assert first_line(process) == "0\n"
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


def test_a_process_whose_disk_is_full_goes_on() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with child(1000, full, "flush") as process:
            assert first_line(process) == "1000\n"
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
    finally:
        os.close(full)


def test_a_line_that_cannot_be_formatted_is_logged(pipe: tuple[int, int]) -> None:
    program = "import logging; from prfaas.service.logging import configure_logging; " + (
        "configure_logging('info'); logging.info('%d', 'word')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    assert b"could not be formatted" in done.stderr and b"TypeError" in done.stderr


COPIES = """
import logging, os, sys, threading, time
from prfaas.service.logging import configure_logging, flush_log
configure_logging("info")
for number in range(20):
    logging.info("before %d", number)
held = logging.getLogger().handlers[0]._writer._changed if "held" in sys.argv else None
if held is not None:  # by another thread, which the copy does not have
    ready = threading.Event()
    def hold():
        with held:
            ready.set()
            threading.Event().wait(1.0)
    threading.Thread(target=hold, daemon=True).start()
    ready.wait()
process_id = os.fork()
if process_id == 0:
    logging.warning("of the copy")
    began = time.monotonic()
    logging.shutdown()
    os._exit(time.monotonic() - began > 1.5)
assert os.waitpid(process_id, 0)[1] == 0
logging.warning("of the first one")
"""


@pytest.mark.parametrize("held", [[], ["held"]], ids=["free", "held"])
def test_a_copy_of_the_process_writes_its_own_lines(held: list[str]) -> None:
    """Each line once, and the copy waits for no thread that it does not have."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COPIES, *held],
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
        text=True,
    )
    lines = [line.split("root ")[1] for line in done.stderr.splitlines()]
    expected = [*(f"before {number}" for number in range(20)), "of the copy", "of the first one"]
    assert sorted(lines) == sorted(expected)
