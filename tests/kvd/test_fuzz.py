"""A small part of `make fuzz`: mutated messages to kvds, with a fixed seed."""

from __future__ import annotations

import pytest

from tests.kvd.fuzz.conversions import fuzz_conversions
from tests.kvd.fuzz.data_port import fuzz_data_port
from tests.kvd.fuzz.in_process import fuzz_in_process
from tests.kvd.fuzz.sockets import fuzz_sockets


def test_mutated_messages_in_process_leave_nothing() -> None:
    # With this seed: a model whose segments ranks write by heads, and memory for many leases.
    outcome = fuzz_in_process(4_000, seed=5)
    assert outcome.messages >= 4_000
    for reached in ("LeaseTicket", "Done", "Refused", "TransferEnded", "HTTP 200", "HTTP 400"):
        assert outcome.answers[reached] > 20, outcome


def test_conversions_that_mutated_numbers_steer_stay_within_their_memory() -> None:
    done = fuzz_conversions(600, seed=3)
    assert done.cases == 600
    for reached in (
        *("ticket refused", "read refused", "read jointly", "read mapped", "write", "write mapped"),
        *("form refused", "save", "save refused", "load", "load refused", "blocks as rows"),
    ):
        assert done.outcomes[reached] > 5, done


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_messages_over_sockets_leave_nothing(workers: int) -> None:
    outcome = fuzz_sockets(600, seed=1, workers=workers)
    assert outcome.messages >= 600
    assert outcome.cut > outcome.connections // 4
    for reached in ("LeaseTicket", "Done", "Refused", "HTTP 200", "HTTP 400"):
        assert outcome.answers[reached] > 10, outcome


@pytest.mark.slow
def test_mutated_frames_to_a_data_port_with_a_worker_leave_nothing() -> None:
    outcome = fuzz_data_port(1_000, seed=1)
    assert outcome.frames >= 1_000
    assert outcome.committed and outcome.hand_overs
    for reached in ("WELCOME", "OPENED", "NACK", "ENDED"):
        assert outcome.answers[reached] > 10, outcome
