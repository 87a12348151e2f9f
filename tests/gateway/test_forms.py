"""A gateway over engines that hand over in two forms: what it chooses, and where it shows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.gateway.dispatch import handoff
from prfaas.types import TransferId
from tests.gateway.backends import answered, gateway_request, prompt, until, with_role
from tests.gateway.dispatch.test_handoff import COMMIT, GRANT, ID, OPEN, PREFILL, PREFILLED, status
from tests.gateway.fleet.test_hostile_members import Case, gateway
from tests.gateway.fleet.test_polling import STATS
from tests.gateway.fleets import LONG
from tests.gateway.reports import NATIVE_BLOCK, compat, native_compat, report

FAR = "bad"  # the remote node of the gateway under test
RENDER = "POST /v1/completions/render"  # the decode engine checks the fields of a request
ANSWER = {"choices": [{"token_ids": [5, 6]}], "usage": {"completion_tokens": 2}}


@pytest.fixture(autouse=True)
def same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "new_transfer_id", lambda: TransferId(ID))


async def register(one: Case, layouts: dict[str, str], instance: str = "second") -> None:
    """The engines of these nodes have both forms, with these native layouts."""
    for name, layout in layouts.items():
        found = report(name, instance=instance, native=layout)
        await one.pair(name).kvd.script(STATS, found)
    await until(lambda: all(layout_of(one, name) == layouts[name] for name in layouts))
    await until(lambda: len(one.backend.fleet.sets) == 1 and bool(one.state(FAR)["in_use"]))


def layout_of(one: Case, name: str) -> str | None:
    found = one.state(name)["forms"].get("native")
    return None if found is None else str(found["layout"])


async def hand_over(one: Case, seed: int, form: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A long request: its trace, the transfer that was requested, and the body that the decode
    engine got. The decode node's kvd grants this form."""
    (decode,) = with_role(one.backend, "decode")
    kvd, engine = one.pair(decode).kvd, one.pair(decode).engine
    await kvd.script(OPEN, msgspec.structs.replace(GRANT, form=form))
    await kvd.script(COMMIT, status("committed"))
    await one.pair(FAR).engine.script(PREFILL, PREFILLED)
    await engine.script(RENDER, {})
    await engine.script(PREFILL, ANSWER)
    found = await answered(one.backend, gateway_request(prompt(LONG, seed), stream=False))
    assert found.tokens == [5, 6] and found.trace.prefill == FAR and found.trace.attempts == 1
    return found.trace, kvd.bodies[OPEN][-1], engine.bodies[PREFILL][-1]


async def test_equal_engines_use_the_native_form_and_others_the_canonical_one() -> None:
    async with gateway() as one:
        await register(one, {"a": "vllm-a", "b": "vllm-a", FAR: "vllm-a"})
        trace, opened, body = await hand_over(one, 1, "native")
        assert trace.form == "native"
        assert opened["compat"] == msgspec.to_builtins(native_compat())
        assert body["kv_transfer_params"]["form"] == "native"
        await register(one, {FAR: "vllm-b"}, "third")
        trace, opened, body = await hand_over(one, 2, "canonical")
        assert trace.form == "canonical"
        assert opened["compat"] == msgspec.to_builtins(compat())
        assert body["kv_transfer_params"]["form"] == "canonical"


async def test_explain_and_state_show_the_forms() -> None:
    async with gateway() as one:
        await register(one, {"a": "vllm-a", "b": "vllm-a", FAR: "vllm-b"})
        found = one.backend.explain(gateway_request(prompt(LONG, 3)))
        assert found["chosen"]["prefill"] == FAR and found["chosen"]["form"] == "canonical"
        handed_off = [option for option in found["alternatives"] if not option["alone"]]
        forms = {option["cluster"]: option["form"] for option in handed_off}
        assert forms == {"pd": "native", "far": "canonical"}
        shown = one.state("a")["forms"]
        assert list(shown) == ["canonical", "native"], "the one that counts for sets is first"
        assert shown["native"] == {
            **{"layout": "vllm-a", "block_tokens": NATIVE_BLOCK, "indexed": True},
            **{"kv_dtype": "float32", "state_dtype": "float32"},
            "cache": {
                "block_tokens": NATIVE_BLOCK,
                "used_bytes": 3 * 8192,
                "evictable_bytes": 8192,
                "capacity_bytes": 100 * 8192,
            },
        }
        assert shown["canonical"]["cache"] == one.state("a")["cache"]


async def test_a_request_without_a_hand_off_has_no_form() -> None:
    async with gateway() as one:
        await register(one, {"a": "vllm-a", "b": "vllm-a", FAR: "vllm-a"})
        (decode,) = with_role(one.backend, "decode")
        await one.pair(decode).engine.script(PREFILL, ANSWER)
        asked = gateway_request(prompt(300, 4), stream=False, prompt_logprobs=True)
        found = await answered(one.backend, asked)
        assert found.trace.form == "" and found.trace.prefill == found.trace.decode
