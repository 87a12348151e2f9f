from __future__ import annotations

import asyncio
import json

from prfaas.launch.request_outcomes import RequestOutcomes


def line(id: str = "r1", **changed: object) -> str:
    told: dict[str, object] = {
        "id": id, "path": "/v1/completions", "outcome": "completed", "route": "remote",
        "reason": "long", "cluster": "far", "prefill": "p", "decode": "d", "prompt_tokens": 100,
        "cached_tokens": 40, "output_tokens": 5, "bytes": 9, "attempts": 1, "ttft_s": 0.5,
        "total_s": 1.0, **changed,
    }  # fmt: skip
    return "2026-01-01 prfaas.gateway.requests " + json.dumps(told, separators=(",", ":"))


def test_counts_by_route_and_outcome() -> None:
    stories = RequestOutcomes()
    for text in (line(), line("r2", route="local", ttft_s=0.1), line("r3", outcome="failed",
                 ttft_s=None), "something else", 'broken {"id": 1'):  # fmt: skip
        stories.heard(text)
    assert stories.outcomes == {
        ("remote", "completed"): 1, ("local", "completed"): 1, ("remote", "failed"): 1
    }  # fmt: skip
    assert stories.ttfts_s("remote") == [0.5] and stories.ttfts_s("local") == [0.1]
    assert (stories.prompt_tokens, stories.cached_tokens) == (200, 80)


async def test_a_line_that_is_still_to_come() -> None:
    stories = RequestOutcomes()
    stories.heard(line("early"))
    waiting = asyncio.create_task(stories.of("late"))
    await asyncio.sleep(0)
    stories.heard(line("late", reason="short"))
    assert (await stories.of("early")).reason == "long"
    assert (await waiting).reason == "short"
