"""A server's profile from outside is the profile it follows: to the microsecond where a timetable
answers, and in all but its times where a node does, because a busy machine adds to those."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import takewhile
from typing import cast

import msgspec
import pytest

from prfaas.catalog import Accelerator, DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.write import profile_toml
from prfaas.clock import MonotonicClock
from prfaas.contracts.readiness import NodeReady
from prfaas.errors import InputError
from prfaas.measure.client import Target, TimedResponse, connect
from prfaas.measure.http_profile import HttpProfiler
from prfaas.measure.measured_profile import MeasuredProfile
from prfaas.measure.prompts import PromptGenerator
from tests.node.hosts import Process

BLOCK = 64
ROUND_TRIP_S = 0.01
TRUE = ProfileRecord(
    model="case-study-1t",
    accelerator="slow",
    gpus=1,
    status="measured",
    source="made up",
    prefill=[PrefillPoint(256, 0, 0.15), PrefillPoint(1024, 0, 0.4), PrefillPoint(256, 512, 0.25),
             PrefillPoint(1024, 512, 0.55)],
    decode=[DecodePoint(1, 0.03), DecodePoint(4, 0.05)],
)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("profile") / "slow.toml"
    path.write_text(profile_toml(TRUE, Accelerator("slow")))
    node = Process(
        "node", "--engine", "emulated", "--model", "case-study-1t", "--accelerator", "slow",
        "--set", "node.emulated.gpus=1", "--set", f"node.emulated.catalog=['{path}']",
        "--set", "node.emulated.byte_scale=1e-4", "--", "--memory", "64MiB",
    )  # fmt: skip
    yield node.ready(NodeReady).http
    node.stop()


class Timetable:
    """A `Target` whose responses take the times of `TRUE`."""

    url, model = "http://timetable", TRUE.model

    def __init__(self) -> None:
        self._kept: list[list[int]] = []
        self._running = 0

    async def round_trip_s(self) -> float:
        return ROUND_TRIP_S

    async def complete(self, body: bytes) -> TimedResponse:
        fields = msgspec.json.decode(body)
        ids, steps = fields["prompt"], fields["max_tokens"]
        cached = max((common(ids, kept) for kept in self._kept), default=0)
        self._kept.append(ids)
        prefill = {(point.new, point.cached): point.seconds for point in TRUE.prefill}
        first_s = ROUND_TRIP_S + (prefill.get((len(ids) - cached, cached)) or 0.0)
        self._running += 1
        await asyncio.sleep(0)  # all concurrent requests have arrived
        step_s = {point.batch: point.step_s for point in TRUE.decode}[self._running]
        await asyncio.sleep(0)
        self._running -= 1
        event_times_s = [first_s + step * step_s for step in range(steps)]
        return TimedResponse(0.0, event_times_s, cached_tokens=cached)


def common(ids: list[int], kept: list[int]) -> int:
    """Tokens of whole blocks in which both begin, without the last token of `ids`."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(ids[:-1], kept, strict=False))
    return sum(1 for _ in same) // BLOCK * BLOCK


async def profiled(target: Target, cached: list[int]) -> MeasuredProfile:
    profiler = HttpProfiler(
        target, PromptGenerator(), lengths=[256, 1024], cached=cached, batches=[1, 4], rounds=2
    )
    counts: list[int] = []
    measured = await profiler.measured(counts.append)
    assert counts == list(range(1, len(profiler) + 1))
    assert [(p.new_tokens, p.cached_tokens) for p in measured.prefill] == [
        (n, c) for c in (0, *cached) for n in (256, 1024)
    ]
    assert [step.batch for step in measured.decode] == [1, 4]
    assert measured.context_tokens == 256 and not measured.kv_bytes
    return measured


async def test_gives_back_what_the_server_follows() -> None:
    measured = await profiled(cast(Target, Timetable()), [512])
    assert [p.seconds for p in measured.prefill] == pytest.approx([p.seconds for p in TRUE.prefill])
    assert [s.step_s for s in measured.decode] == pytest.approx([p.step_s for p in TRUE.decode])


async def profiled_at(url: str, cached: list[int]) -> MeasuredProfile:
    async with connect(url, MonotonicClock()) as target:
        return await profiled(target, cached)


@pytest.mark.slow
async def test_measures_a_node(url: str) -> None:
    measured = await profiled_at(url, [512])
    assert all(p.seconds > 0 for p in measured.prefill)
    assert all(step.step_s > 0 for step in measured.decode)


async def test_a_prefix_that_is_not_kept_is_no_measurement(url: str) -> None:
    with pytest.raises(InputError, match="--cached.*multiples of its block size"):
        await profiled_at(url, [500])
