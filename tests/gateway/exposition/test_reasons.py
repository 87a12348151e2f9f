"""Reasons of routes as labels: each has one, and there are few."""

from __future__ import annotations

import pytest

from prfaas.gateway.exposition import reasons
from prfaas.gateway.exposition.reasons import LABELS, OTHER, label_of
from prfaas.scheduler.homes.elsewhere import ELSEWHERE
from prfaas.scheduler.request import Request, local_only_reason
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import LONG, SHORT, fleet_and_router, place, placement


@pytest.mark.parametrize("policy", ["paper", "adaptive", "local", "remote"])
@pytest.mark.parametrize("tokens", [SHORT, LONG])
async def test_the_reason_of_every_policy_has_a_label(policy: str, tokens: int) -> None:
    clock = FakeClock()
    _, router = fleet_and_router(clock, policy=policy)
    wanted = placement(tokens, clock)
    await place(router, wanted)
    assert wanted.booking is not None
    assert label_of(wanted.booking.route.reason) in LABELS - {OTHER}


@pytest.mark.parametrize(
    "request_",
    [
        Request(0, 1, prompt_logprobs=True),
        Request(0, 1, adapter="lora"),
        Request(0, 1, multimodal=True),
        Request(0, 1, decode_only=True),
    ],
    ids=str,
)
def test_what_may_not_be_offloaded_has_a_label(request_: Request) -> None:
    reason = local_only_reason(request_)
    assert reason is not None and label_of(reason) in LABELS - {OTHER}


def test_names_of_clusters_do_not_make_labels() -> None:
    labels = {label_of(f"{ELSEWHERE}; at {name}: short") for name in ("a", "b")}
    assert labels == {"another cluster"} <= LABELS
    assert label_of("a sentence that no policy says") == OTHER
    assert set(reasons._LABELS.values()) <= LABELS
