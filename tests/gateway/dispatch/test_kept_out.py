from __future__ import annotations

from dataclasses import replace

from prfaas.gateway.client.request_body import JsonParts
from prfaas.gateway.dispatch.kept_out import (
    KEPT_OUT_S,
    MOST_KEPT_OUT,
    KeptOut,
    digest_of,
    hashed_bytes,
)
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import gateway_request, prompt


def test_a_request_is_kept_out_for_a_while() -> None:
    clock = FakeClock()
    kept_out = KeptOut(clock)
    kept_out.add(b"one")
    clock.advance(100.0)
    kept_out.add(b"two")
    assert (kept_out.left_s(b"one"), kept_out.left_s(b"two")) == (KEPT_OUT_S - 100, KEPT_OUT_S)
    assert kept_out.left_s(b"three") == 0.0
    clock.advance(KEPT_OUT_S - 100)
    assert (kept_out.left_s(b"one"), kept_out.left_s(b"two"), len(kept_out)) == (0.0, 100.0, 1)
    kept_out.add(b"two")  # it has cost nodes again
    clock.advance(100.0)
    assert (kept_out.left_s(b"two"), len(kept_out)) == (KEPT_OUT_S - 100, 1)


def test_the_oldest_leaves_first() -> None:
    clock = FakeClock()
    kept_out = KeptOut(clock)
    for number in range(MOST_KEPT_OUT + 1):
        kept_out.add(b"%d" % number)
    assert len(kept_out) == MOST_KEPT_OUT
    assert (kept_out.left_s(b"0"), kept_out.left_s(b"1")) == (0.0, KEPT_OUT_S)


def test_the_same_request_is_known_by_all_that_engines_see_of_it() -> None:
    request = gateway_request(prompt(100), tenant="one")
    same = gateway_request(prompt(100), tenant="one")
    assert request.id != same.id and digest_of(request) == digest_of(same)
    others = [
        replace(request, token_ids=gateway_request(prompt(100, "other")).token_ids),
        replace(request, fields={**request.fields, "max_tokens": 5}),
        replace(request, fields={**request.fields, "stop": ["a"]}),
        replace(request, path="/v1/chat/completions"),
        replace(request, tenant="two"),
        replace(request, salt="two"),
    ]
    assert len({digest_of(one) for one in (request, *others)}) == 1 + len(others)


def test_a_long_conversation_is_hashed_as_it_lies_there() -> None:
    request = gateway_request(prompt(100))
    short, long = (
        replace(request, fields={**request.fields, "messages": JsonParts(b'["', text, b'"]')})
        for text in (b"a" * 10, b"a" * (1 << 20))
    )
    assert digest_of(short) != digest_of(long)
    assert hashed_bytes(short) < 1 << 10 < 1 << 20 < hashed_bytes(long)
