"""Requests through the back: real kvds and nodes, engines that check every byte they resume from."""

from __future__ import annotations

import asyncio

from tests.gateway.backs import (
    THRESHOLD,
    answered,
    ask,
    is_clean,
    prompt,
    serving,
    until,
    with_role,
)
from tests.gateway.conftest import Hosts

LONG, SHORT = 2 * THRESHOLD, THRESHOLD // 2


def alone(hosts: Hosts, ids: list[int], max_tokens: int = 4) -> list[int]:
    """One process that has computed everything itself."""
    answer = hosts.home[0].complete(ids, max_tokens=max_tokens, cache_salt="alone")
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_long_prompts_are_prefilled_far_away_and_short_ones_at_home(emulated: Hosts) -> None:
    async def main() -> None:
        async with serving(emulated.deployment()) as back:
            (near,) = with_role(back, "prefill")
            for ids, where, cluster in ((prompt(LONG), "far0", "far"), (prompt(SHORT), near, "pd")):
                found = await answered(back, ask(ids))
                assert found.tokens == alone(emulated, ids)
                assert (found.story.prefill, found.story.cluster) == (where, cluster)
                assert found.story.decode in with_role(back, "decode")
                assert found.story.offloaded == (cluster == "far")
                story = found.story
                times = (story.routed_s, story.granted_s, story.committed_s, story.first_token_s)
                assert None not in times and list(times) == sorted(times)
            await until(lambda: is_clean(back))

    asyncio.run(main())
    emulated.wait_until_idle()
