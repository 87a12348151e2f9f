"""Faults that take the transport's own patience, or the start of two engines: with one pair."""

from __future__ import annotations

import signal

import pytest

from tests.vllm.cases import LONG, MAX_TOKENS, PROMPTS, TURNS, WITH_CACHE, Case, boundary, case_id
from tests.vllm.faults import Damage, check_lost, relayed
from tests.vllm.pairs import PATIENCE_S, decode_params, prefill_params
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.usefixtures("unharmed"),
    pytest.mark.parametrize("case", WITH_CACHE[:1], indirect=True, ids=case_id),
]

LONG_TOKENS = LONG - 1


def test_a_wire_that_damages_everything_delivers_nothing(hasty: Case) -> None:
    prompt = PROMPTS["long"][1]
    damage = Damage(at_most=None)
    with relayed(hasty.pair.grant(prompt, LONG_TOKENS), damage) as grant:
        hasty.pair.run_prefill(prompt, LONG_TOKENS, grant)
        status = hasty.pair.target.status(grant.transfer_id, wait_s=PATIENCE_S)
    assert damage.done and status.state == "failed", status
    check_lost(hasty, prompt, grant.transfer_id)


@pytest.mark.grid
def test_both_engines_killed_at_work_and_started_again(case: Case) -> None:
    """Pages come back without them, what the kvds keep outlives them."""
    long = PROMPTS["long"][5]
    (first, second), expected = PROMPTS["kept"], case.model.expected["kept"]
    kept = case.pair.hand_off(first, boundary(TURNS[0]))
    grant = case.pair.grant(long, LONG_TOKENS)
    decoding = {"kv_transfer_params": decode_params(kept["transfer_id"])}
    prefilling = {"kv_transfer_params": prefill_params(LONG_TOKENS, grant)}
    with case.pair.decode.streaming(first, 2000, **decoding) as pieces:
        next(pieces)
        with case.pair.prefill.streaming(long, 1, **prefilling):
            wait_until(lambda: case.pair.source.report().held_leases > 0)
            for server in (case.pair.prefill, case.pair.decode):
                server.kill(signal.SIGKILL)
    wait_until(case.pair.source.idle)
    status = case.pair.target.status(grant.transfer_id, wait_s=PATIENCE_S)
    assert status.state == "failed", status
    wait_until(case.pair.target.idle)
    for server in (case.pair.prefill, case.pair.decode):
        server.process.wait(PATIENCE_S)

    case.pair.start_engines()
    check_lost(case, first, kept["transfer_id"])
    more = case.pair.hand_off(second, boundary(TURNS[1]))
    assert case.pair.sent_bytes(more) == case.pair.source.handoff_bytes(
        boundary(TURNS[1]), skip_tokens=boundary(TURNS[0])
    )
    answer = case.pair.resume(second, MAX_TOKENS, more["transfer_id"]).generated
    assert answer.same(expected[1])
