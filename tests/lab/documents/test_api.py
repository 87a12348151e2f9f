from __future__ import annotations

import asyncio
from pathlib import Path

from prfaas.engine.emulated.pace import Scales
from prfaas.node.served.reference import at_node, at_vllm, reference
from tests.engine.emulated.builders import emulated
from tests.node.local_api import local_api
from tests.waiting import HANG_S

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_that_of_the_schema() -> None:
    assert PAGE.read_text() == reference(), "docs/api.md is stale; run `make docs`"


def test_what_becomes_of_a_field() -> None:
    assert at_node("completions", "temperature") == "served"
    assert at_node("completions", "use_beam_search") == "only `false`"
    assert at_node("chat", "metadata") == "no effect"
    assert at_node("completions", "moderation") == "refused"
    assert at_vllm("chat", "structured_outputs") == "passed on"
    assert at_vllm("chat", "guided_json") == at_vllm("chat", "chat_template") == "refused"
    assert at_vllm("completions", "best_of") == "only `1`"


async def test_a_node_publishes_the_fields_that_it_accepts() -> None:
    engine = emulated(scales=Scales(time=1e-3))
    async with asyncio.timeout(HANG_S), local_api(engine) as node:
        async with node.http.get("/v1/models") as answer:
            (card,) = (await answer.json())["data"]
    published = card["prfaas"]["serves"]
    assert "prompt" in published["completions"] and "prompt" not in published["chat"]
    assert {"user", "use_beam_search", "kv_transfer_params"} <= set(published["completions"])
    assert all(names == sorted(set(names)) for names in published.values())
