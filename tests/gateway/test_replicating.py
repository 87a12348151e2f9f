"""A hot prefix whose only holder is saturated gets a second one, on real kvds and nodes."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.gateway.replicating import LONGEST_DRAIN_S, is_calm
from prfaas.types import LinkStats
from tests.gateway.backs import is_clean, moved, serving, until, with_role
from tests.gateway.conftest import Hosts
from tests.gateway.hot import SHARED_TOKENS, Crowd, deployment
from tests.gateway.reports import report


def test_a_saturated_holder_gets_company(
    unassigned: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas.gateway.moves")

    async def main() -> None:
        async with serving(deployment(unassigned, saturated_s=0.05)) as back:
            crowd = Crowd(unassigned, back, "replicating")
            holder = await crowd.warm()
            (name,) = set(with_role(back, "prefill")) - {holder.stats()["node"]}
            other = unassigned.named(name)
            await crowd.burst(3)
            await until(lambda: moved(back, "replicate") == (1, 0))
            assert crowd.held_by(other) == SHARED_TOKENS
            before = other.hit_tokens()
            await crowd.burst(8)  # the holder is still the busier one
            assert other.hit_tokens() > before
            assert (other.hit_tokens() - before) % SHARED_TOKENS == 0, "it computes none of it"
            await until(lambda: is_clean(back))
            metrics = {
                (sample.name, *sample.labels.values()): sample.value
                for family in back.metrics()
                for sample in family.samples
            }
            assert metrics["prfaas_gateway_moves_total", "replicate", "made"] == 1
            assert metrics["prfaas_gateway_moved_tokens_total", "replicate"] == SHARED_TOKENS
            assert back.state()["moves"]["replicate"]["bytes"] > 0

    asyncio.run(main())
    unassigned.wait_until_idle()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("replicate")]
    assert len(lines) == 1 and f"{SHARED_TOKENS} tokens" in lines[0]


def link(backlog_bytes: int, drain_s: float | None) -> LinkStats:
    return LinkStats(
        peer="b:7400",
        at_s=1.0,
        connections=1,
        goodput_bps=1e9,
        backlog_bytes=backlog_bytes,
        in_flight_bytes=0,
        drain_s=drain_s,
        rtt_s=0.001,
        delivery_bps=1e9,
        retransmitted_segments=0,
        congestion_window_bytes=None,
    )


def test_a_sender_that_has_enough_to_do_is_left_alone() -> None:
    soon, late = link(1000, LONGEST_DRAIN_S / 2), link(1000, 2 * LONGEST_DRAIN_S)
    assert is_calm(report("a"))
    assert is_calm(report("a", links=(link(0, None), soon)))
    assert not is_calm(report("a", links=(soon, late)))
    assert not is_calm(report("a", links=(link(1000, None),))), "nothing of it passes"
