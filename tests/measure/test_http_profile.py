"""A server's profile from outside is the profile it follows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from prfaas.catalog import Accelerator, DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.write import profile_toml
from prfaas.clock import MonotonicClock
from prfaas.engine.profiling import Measured
from prfaas.errors import InputError
from prfaas.measure.client import connect
from prfaas.measure.http_profile import HttpProfiler
from prfaas.measure.prompts import Prompts
from tests.node.hosts import Process

# Long beside what a busy machine adds, so that 15% are safe.
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
        "--gpus", "1", "--catalog", str(path), "--byte-scale", "1e-4", "--", "--memory", "64MiB",
    )  # fmt: skip
    yield node.find(r"serving \S+ at (http://\S+)")
    node.stop()


async def profiled(url: str, cached: list[int]) -> Measured:
    async with connect(url, MonotonicClock()) as target:
        profiler = HttpProfiler(
            target, Prompts(), lengths=[256, 1024], cached=cached, batches=[1, 4], rounds=2
        )
        told: list[int] = []
        measured = await profiler.measured(told.append)
        assert told == list(range(1, len(profiler) + 1))
        return measured


@pytest.mark.slow  # times are asserted: a machine with other work may fail it
def test_gives_back_what_the_node_follows(url: str) -> None:
    measured = asyncio.run(profiled(url, [512]))
    assert [(p.new_tokens, p.cached_tokens) for p in measured.prefill] == [
        (p.new, p.cached) for p in TRUE.prefill
    ]
    for found, true in zip(measured.prefill, TRUE.prefill, strict=True):
        assert true.seconds is not None and found.seconds == pytest.approx(true.seconds, rel=0.15)
    for step, point in zip(measured.decode, TRUE.decode, strict=True):
        assert (step.batch, step.step_s) == (point.batch, pytest.approx(point.step_s, rel=0.15))
    assert measured.context_tokens == 256 and not measured.kv_bytes


def test_a_prefix_that_is_not_kept_is_no_measurement(url: str) -> None:
    with pytest.raises(InputError, match="--cached.*multiples of its block size"):
        asyncio.run(profiled(url, [500]))
