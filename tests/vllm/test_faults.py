"""Whatever breaks between two vLLM servers: never a wrong token, never a dead engine, and pages and
blocks come back on both sides. Every test leaves a pair that hands off as before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.types import NotNow, TransferId
from tests.vllm.cases import LONG, MAX_TOKENS, PROMPTS, TURNS, WITH_CACHE, Case, boundary, case_id
from tests.vllm.faults import DAMAGE_FROM, Damage, check_lost, relayed
from tests.vllm.pairs import PATIENCE_S, decode_params, prefill_params
from tests.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.usefixtures("unharmed"),
    pytest.mark.parametrize("case", WITH_CACHE, indirect=True, ids=case_id),
]

LONG_TOKENS = LONG - 1


# On the wire --------------------------------------------------------------------------------------


def test_damaged_bytes_are_sent_again(case: Case) -> None:
    prompt, expected = PROMPTS["long"][0], case.model.expected["long"][0]
    damage = Damage(at_most=3)
    with relayed(case.pair.grant(prompt, LONG_TOKENS), damage) as grant:
        params = case.pair.send(prompt, LONG_TOKENS, grant)
    assert damage.done == 3
    assert case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).generated.same(expected)


def test_a_link_that_stalls_beyond_the_deadline(hasty: Case) -> None:
    """What came before the stall is given up with the rest."""
    prompt = PROMPTS["long"][2]
    passed: list[int] = []

    def swallow(connection: int, before: int, data: bytes) -> bytes:
        if before < DAMAGE_FROM:
            passed.append(len(data))
            return data
        return b""

    with relayed(hasty.pair.grant(prompt, LONG_TOKENS), swallow) as grant:
        hasty.pair.run_prefill(prompt, LONG_TOKENS, grant)
        status = hasty.pair.target.status(grant.transfer_id, wait_s=PATIENCE_S)
    assert passed and status.state == "failed", status
    assert "no frame arrived in time" in status.reason
    check_lost(hasty, prompt, grant.transfer_id)


# Gateways and clients that go away ----------------------------------------------------------------


def test_a_gateway_gone_after_the_grant(hasty: Case) -> None:
    prompt = PROMPTS["faults"][0]
    grant = hasty.pair.grant(prompt, len(prompt) - 1)
    assert not hasty.pair.target.idle()
    wait_until(hasty.pair.target.idle)
    # Its prefill comes too late: it is refused, and nothing is sent.
    before = hasty.pair.target.report().arrivals.received_bytes
    late = hasty.pair.run_prefill(prompt, len(prompt) - 1, grant)
    assert late.status == 200
    assert hasty.pair.target.status(grant.transfer_id).state == "failed"
    assert hasty.pair.target.report().arrivals.received_bytes == before
    check_lost(hasty, prompt, grant.transfer_id)


def test_a_gateway_gone_after_the_prefill(hasty: Case) -> None:
    prompt = PROMPTS["faults"][1]
    grant = hasty.pair.grant(prompt, len(prompt) - 1)
    assert hasty.pair.run_prefill(prompt, len(prompt) - 1, grant).status == 200
    wait_until(hasty.pair.target.idle)  # asking for the transfer would be a gateway's poll
    check_lost(hasty, prompt, grant.transfer_id)


def test_a_client_aborts_between_prefill_and_decode(case: Case) -> None:
    prompt, expected = PROMPTS["faults"][2], case.model.expected["faults"][2]
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    case.pair.target.abort(TransferId(params["transfer_id"]))
    check_lost(case, prompt, params["transfer_id"])
    check_lost(case, prompt, "no-such-transfer")
    # Whole blocks stay as a prefix: asking again sends next to nothing.
    again = case.pair.hand_off(prompt, boundary(len(prompt)))
    assert case.pair.sent_bytes(again) < case.pair.sent_bytes(params)
    assert case.pair.resume(prompt, MAX_TOKENS, again["transfer_id"]).generated.same(expected)


def test_a_client_hangs_up_in_mid_prefill(case: Case) -> None:
    prompt = PROMPTS["long"][3]
    grant = case.pair.grant(prompt, LONG_TOKENS)
    params = prefill_params(LONG_TOKENS, grant)
    with case.pair.prefill.streaming(prompt, 1, kv_transfer_params=params):
        wait_until(lambda: case.pair.source.report().held_leases > 0)
    status = case.pair.target.status(grant.transfer_id, wait_s=PATIENCE_S)
    assert status.state == "failed", status
    check_lost(case, prompt, grant.transfer_id)


def test_a_client_hangs_up_in_mid_decode(case: Case) -> None:
    prompt = PROMPTS["faults"][3]
    params = decode_params(case.pair.hand_off(prompt, len(prompt) - 1)["transfer_id"])
    with case.pair.decode.streaming(prompt, 2000, kv_transfer_params=params) as pieces:
        next(pieces)
        assert not case.pair.decode.idle()


# Kvds -------------------------------------------------------------------------------------------


def test_a_grant_pins_its_prefix_while_others_press(case: Case) -> None:
    """A receiver with room for three prompts: a conversation's first turn stays for the second,
    which was granted, whatever comes in between."""
    first, second = PROMPTS["pinned"]
    expected = case.model.expected["pinned"][1]
    # An eighth of the memory is for the canonical form.
    room = case.pair.target.handoff_bytes(boundary(TURNS[1])) * 7 // 2 * 8 // 7
    # On a busy machine, what comes in between takes longer than grants usually last.
    case.pair.restart_target(memory_bytes=room, grant_s=HANG_S)
    try:
        whole = case.pair.hand_off(first, boundary(TURNS[0]))
        case.pair.target.abort(TransferId(whole["transfer_id"]))  # the prefix stays
        grant = case.pair.grant(second, boundary(TURNS[1]))
        assert boundary(TURNS[0]) in grant.skip_tokens.values()
        outcomes = [_pressed(case, prompt) for prompt in PROMPTS["faults"][4:]]
        assert any(outcomes), "nothing came in between"
        counters = case.pair.target.pool().counters
        assert counters.evicted_blocks > 0, "there was room for all"
        params = case.pair.send(second, boundary(TURNS[1]), grant)
        answer = case.pair.resume(second, MAX_TOKENS, params["transfer_id"]).generated
        assert answer.same(expected)
        wait_until(case.pair.nothing_held)
    finally:
        case.pair.restart_target()


def test_a_sending_kvd_killed_in_the_middle_and_started_again(hasty: Case) -> None:
    prompt, expected = PROMPTS["long"][4], hasty.model.expected["long"][4]
    before = hasty.pair.target.report().arrivals.received_bytes
    grant = hasty.pair.grant(prompt, LONG_TOKENS)
    with ThreadPoolExecutor(1) as threads:
        prefill = threads.submit(hasty.pair.run_prefill, prompt, LONG_TOKENS, grant)
        wait_until(lambda: hasty.pair.target.report().arrivals.received_bytes > before)
        hasty.pair.restart_source()
        answer = prefill.result()
    assert answer.transfer["error"]["code"] in ("transfer_lost", "kvd_unavailable")
    status = hasty.pair.target.status(grant.transfer_id, wait_s=PATIENCE_S)
    assert status.state == "failed", status
    check_lost(hasty, prompt, grant.transfer_id)
    assert hasty.pair.generate(prompt, LONG_TOKENS, MAX_TOKENS).same(expected)


def test_a_receiving_kvd_started_again_has_lost_what_it_held(case: Case) -> None:
    prompt, expected = PROMPTS["edges"][4], case.model.expected["edges"][4]
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    case.pair.restart_target()
    check_lost(case, prompt, params["transfer_id"])
    assert case.pair.generate(prompt, boundary(len(prompt)), MAX_TOKENS).same(expected)


def _pressed(case: Case, prompt: list[int]) -> bool:
    """Another hand-off in between; refusing it is right when there is no room."""
    tokens = boundary(len(prompt))
    grant = case.pair.target.open(prompt, tokens, case.pair.source.compat())
    if isinstance(grant, NotNow):
        return False
    params = case.pair.send(prompt, tokens, grant)
    expected = case.model.expected["faults"][PROMPTS["faults"].index(prompt)]
    answer = case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).generated
    assert answer.same(expected)
    return True
