from __future__ import annotations

import asyncio

from prfaas.engine.emulated.pace import Scales
from tests.engine.emulated.builders import emulated
from tests.node.local_api import local_api
from tests.waiting import HANG_S


async def test_a_node_publishes_the_fields_that_it_accepts() -> None:
    engine = emulated(scales=Scales(time=1e-3))
    async with asyncio.timeout(HANG_S), local_api(engine) as node:
        async with node.http.get("/v1/models") as answer:
            (card,) = (await answer.json())["data"]
    published = card["prfaas"]["serves"]
    assert "prompt" in published["completions"] and "prompt" not in published["chat"]
    assert {"user", "use_beam_search", "kv_transfer_params"} <= set(published["completions"])
    assert all(names == sorted(set(names)) for names in published.values())
