"""The choice between `sendfile` and `sendmsg`: the decision, and a real measurement."""

from __future__ import annotations

import errno
import os

import pytest

from prfaas.transport.host_speed import choose_sending
from prfaas.transport.host_speed.decision import MIN_BURSTS, Burst, Way, choose
from prfaas.transport.host_speed.measurement import BURST_BYTES, measure
from tests.transport.ends import nothing_leaks

GIGABYTE = 1_000_000_000


def bursts(sendfile: list[float], copy: list[float]) -> dict[Way, list[Burst]]:
    """Bursts of a gigabyte with these CPU seconds."""
    return {
        Way.SENDFILE: [Burst(GIGABYTE, cpu_s) for cpu_s in sendfile],
        Way.COPY: [Burst(GIGABYTE, cpu_s) for cpu_s in copy],
    }


@pytest.mark.parametrize(
    ("sendfile", "copy", "send_files"),
    [
        ([0.30] * 5, [0.40] * 5, True),
        ([0.40] * 5, [0.40] * 5, True),
        ([0.40] * 5, [0.33] * 5, True),  # less than a fifth: sendfile remains
        ([0.40] * 5, [0.31] * 5, False),
        ([0.50] * 5, [0.25] * 5, False),
    ],
)
def test_copying_must_save_a_fifth(
    sendfile: list[float], copy: list[float], send_files: bool
) -> None:
    assert choose(bursts(sendfile, copy)).send_files is send_files


def test_single_bursts_do_not_decide() -> None:
    assert choose(bursts([0.30, 0.30, 9.0], [0.40, 0.40, 0.01])).send_files
    assert not choose(bursts([0.50, 0.50, 0.01], [0.25, 0.25, 9.0])).send_files


@pytest.mark.parametrize("few", [0, MIN_BURSTS - 1])
def test_too_few_bursts_change_nothing(few: int) -> None:
    for counts in ((few, 9), (9, few)):
        chosen = choose(bursts([1.0] * counts[0], [0.1] * counts[1]))
        assert chosen.send_files and "too little time" in str(chosen)
    assert choose({}).send_files


def test_the_choice_is_one_sentence() -> None:
    assert str(choose(bursts([0.5] * 3, [0.25] * 3))) == (
        "This host sends KV with sendmsg: on loopback sendfile costs 0.50 CPU seconds per GB "
        "and sendmsg costs 0.25."
    )


def test_both_ways_are_measured() -> None:
    with nothing_leaks():
        found = measure(0.1)
    assert set(found) == set(Way)
    assert len(found[Way.SENDFILE]) - len(found[Way.COPY]) in (0, 1)  # they take turns
    for burst in (*found[Way.SENDFILE], *found[Way.COPY]):
        assert burst.nbytes == BURST_BYTES and burst.cpu_s > 0


def test_without_time_the_default_applies() -> None:
    with nothing_leaks():
        assert choose_sending(0.0).send_files


def test_a_host_that_cannot_be_measured_gets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "sendfile", refuse)
    with nothing_leaks():
        chosen = choose_sending()
    assert chosen.send_files and "Too many open files" in str(chosen)
