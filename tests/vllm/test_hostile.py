"""A hostile tenant's requests at vLLM servers, which know no tenants: whatever they do to their own
answers, another tenant's have the tokens of one plain vLLM, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.backend import GatewayBackend, running
from prfaas.gateway.tenants import Tenants
from tests.engine.guided.test_compiler import ENDLESS
from tests.gateway.backends import (
    answered,
    deployment,
    gateway_request,
    in_use,
    is_clean,
    problem,
    until,
)
from tests.vllm.cases import ALIGNED, MAX_TOKENS, PROMPTS, Case, case_id
from tests.waiting import PATIENCE_S, wait_until

ATTACKS: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"grammar": ENDLESS}},
    "huge regex": {"structured_outputs": {"regex": "(a{1,200}b{1,200}){1,200}"}},
    "nested schema": {
        "structured_outputs": {
            "json": {
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}},
                "$ref": "#/$defs/a",
            }
        }
    },
    "choices": {"structured_outputs": {"choice": [f"{number:032d}" for number in range(2_000)]}},
    "stop strings": {"stop": [chr(97 + number) * 1_024 for number in range(4)], "n": 4},
    "many sequences": {"n": 64, "max_tokens": 20},
    "long lists of tokens": {"logit_bias": {str(token): -1.0 for token in range(256)}, "n": 8},
}
pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.parametrize("case", [("falcon-h1", ALIGNED)], indirect=True, ids=case_id),
]


@asynccontextmanager
async def behind(case: Case) -> AsyncIterator[GatewayBackend]:
    home = {"url": case.pair.decode.url, "kvd_url": case.pair.target.url}
    far = {"url": case.pair.prefill.url, "kvd_url": case.pair.source.url}
    made = deployment([home], [far], prefill=0, policy="remote")
    tenants = Tenants(made.gateway, lambda: ("a", "b"))
    async with running(made, problem(made), tenants=tenants) as backend:
        yield backend


@pytest.mark.parametrize("attack", ATTACKS)
async def test_another_tenant_gets_its_tokens_beside(case: Case, attack: str) -> None:
    expected = [generated.tokens for generated in case.model.expected["all"]]
    fields = {"ignore_eos": True, "temperature": 1.0, **ATTACKS[attack]}

    async def strike(backend: GatewayBackend, number: int) -> str:
        more = {"salt": f"{attack} {number}", "tenant": "a", "n": fields.get("n", 1)}
        asked = gateway_request(PROMPTS["all"][number], 64, **more)
        try:
            await answered(backend, replace(asked, fields={**asked.fields, **fields}))
        except RequestError as error:
            return f"{error.status} {error.code}: {error}"
        return "served"

    async def ask(backend: GatewayBackend, number: int, **more: Any) -> list[int]:
        asked = gateway_request(PROMPTS["all"][number], MAX_TOKENS, salt=attack, tenant="b")
        async with asyncio.timeout(PATIENCE_S):
            return (await answered(backend, replace(asked, fields={**asked.fields, **more}))).tokens

    async with behind(case) as backend:
        await until(lambda: len(in_use(backend)) == 2)
        async with asyncio.TaskGroup() as strikes:
            striking = [strikes.create_task(strike(backend, number)) for number in range(4)]
            for number in range(6):
                assert await ask(backend, number, ignore_eos=True) == expected[number]
            # A grammar that cannot be compiled must not keep others waiting.
            assert await ask(backend, 6, structured_outputs={"choice": ["yes", "no"]})
        await until(lambda: is_clean(backend))
        outcomes = [strike.result() for strike in striking]
        assert all(one == "served" or one.startswith(("400", "503")) for one in outcomes), outcomes
    await asyncio.to_thread(wait_until, case.pair.nothing_held)
