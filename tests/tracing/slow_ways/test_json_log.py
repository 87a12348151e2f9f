"""A gateway that logs JSON: every line is an object, and requests and changes have their fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.gateway.following.request_line import MOST_BYTES
from tests.tracing.slow_ways.conftest import Stage
from tests.tracing.slow_ways.deployment import FAR, LONG, NEAR, SlowDeployment, until

pytestmark = pytest.mark.slow


def test_requests_and_changes_are_one_object_each(stage: Stage) -> None:
    log = stage.hosts.hosts.folder / "gateway.log"
    earlier = log.stat().st_size if log.exists() else 0

    def lines() -> list[dict[str, Any]]:
        # The end of the file may be half a line.
        whole = log.read_bytes()[earlier:].rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def of(event: str) -> list[dict[str, Any]]:
        return [line for line in lines() if line.get("event") == event]

    async def run() -> None:
        async with stage.hosts.gateway(options=("--log-format", "json")) as live:
            answer = await live.ask(live.body(("as JSON", LONG // 4)))
            await until(lambda: is_logged(answer.request_id))
            await cut_and_restore(live)
            found = await live.get(f"/prfaas/v1/requests/{answer.request_id}")
        request, retried = of("request")
        assert retried["attempts"] == 2 and "cut" in retried["failures"][0]
        assert request["id"] == answer.request_id and request["outcome"] == "completed"
        assert request["trace_id"] == found["request"]["trace_id"]
        assert len(json.dumps(request)) <= MOST_BYTES
        assert {line["node"] for line in of("member") if line["change"] == "joined"} == set(
            stage.hosts.hosts.kvds
        )
        assert [line["home"] for line in of("plan")] == [NEAR]
        assert {line["role"] for line in [*of("role"), *of("member")] if "role" in line} == {
            "prefill",
            "decode",
        }
        ways = [(line["source"], line["target"], line["state"]) for line in of("link")]
        assert ways == [(FAR, NEAR, "cut"), (FAR, NEAR, "up")]

    async def is_logged(request_id: str) -> bool:
        return request_id in [line["id"] for line in of("request")]

    async def cut_and_restore(live: SlowDeployment) -> None:
        for order in ("outage", "cut"):
            live.relay.write_line(order)
        try:
            await live.ask(live.body(("during the cut", LONG // 4)))
        finally:
            live.relay.write_line("restore")
        await until(is_restored)

    async def is_restored() -> bool:
        return "up" in [line["state"] for line in of("link")]

    stage.run(run())
