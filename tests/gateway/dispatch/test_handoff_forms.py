"""The form in which a hand-off travels: native between equal engines, canonical otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.dispatch import handoff
from prfaas.gateway.dispatch.handoff import AttemptFailed
from prfaas.scheduler.request import CacheCopy
from prfaas.types import HashEvent, NodeId, TransferId
from tests.gateway.backends import prompt
from tests.gateway.dispatch.test_handoff import (
    ABORT,
    COMMIT,
    GRANT,
    ID,
    OPEN,
    PREFILL,
    PREFILLED,
    PULL,
    Case,
    case,
    status,
)
from tests.gateway.fleets import LONG, A, B, F, member_of
from tests.gateway.peers import peer
from tests.gateway.reports import NATIVE_BLOCK, NODE_CARD, add_native, compat, native_compat, report


@pytest.fixture(autouse=True)
def same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "new_transfer_id", lambda: TransferId(ID))


@asynccontextmanager
async def working() -> AsyncIterator[Case]:
    """`f` prefills, `b` decodes; kvd and node answer as they should."""
    async with case() as one:
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("committed"))
        yield one


async def test_equal_engines_hand_over_natively() -> None:
    async with working() as one:
        add_native(one.fleet, F, B)
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, form="native"))
        params = await one.carry_out()
        assert params == {"do_remote_prefill": True, "transfer_id": ID, "form": "native"}
        (opened,) = await one.kvd.requested(OPEN)
        assert opened["compat"] == msgspec.to_builtins(native_compat())
        assert len(opened["hashes"]) == opened["handoff_tokens"] // NATIVE_BLOCK
        (body,) = await one.node.requested(PREFILL)
        sent = body["kv_transfer_params"]
        assert sent["grant"]["form"] == "native"
        assert sent["handoff_tokens"] == opened["handoff_tokens"] == len(body["prompt"])
        assert one.trace.form == "native"


async def test_the_chosen_format_decides_the_length_and_the_hashes() -> None:
    """The hand-off ends at the last boundary of the blocks that the two engines have."""
    async with working() as one:
        ids = prompt(2030)
        one.request = replace(one.request, token_ids=TokenIds.of(ids), conversation=True)
        add_native(one.fleet, F, B)
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, form="native"))
        await one.carry_out()
        (opened,) = await one.kvd.requested(OPEN)
        hashes = PromptHashes(ids).at(NATIVE_BLOCK)[: opened["handoff_tokens"] // NATIVE_BLOCK]
        assert opened["hashes"] == list(msgspec.to_builtins(tuple(hashes)))
        assert opened["handoff_tokens"] == 2016, "the canonical form has no boundary there"


@pytest.mark.parametrize("layout", ["vllm-b", None])
async def test_unlike_engines_hand_over_in_the_canonical_form(layout: str | None) -> None:
    """The decode engine has another native layout, or none."""
    async with working() as one:
        add_native(one.fleet, F)
        if layout is not None:
            add_native(one.fleet, B, layout=layout)
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, form="canonical"))
        params = await one.carry_out()
        assert params["form"] == "canonical" and one.trace.form == "canonical"
        (opened,) = await one.kvd.requested(OPEN)
        assert opened["compat"] == msgspec.to_builtins(compat())
        assert len(opened["hashes"]) == opened["handoff_tokens"] // 64


async def test_a_grant_of_another_form_is_refused_and_aborted() -> None:
    async with working() as one:
        add_native(one.fleet, F, B)
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, form="canonical"))
        with pytest.raises(AttemptFailed, match="granted the canonical form, and not") as failed:
            await one.carry_out()
        assert failed.value.avoid == (B,) and one.trace.form == ""
        await one.kvd.requested(ABORT)
        assert PREFILL not in one.node.bodies


async def test_engines_without_a_common_format_are_told_what_differs() -> None:
    async with working() as one:
        add_native(one.fleet, B)
        upgraded = report("f", instance="second", revision="2", native="vllm-b")
        one.fleet.record_report(member_of(one.fleet, F), upgraded)
        one.fleet.record_card(member_of(one.fleet, F), NODE_CARD)
        with pytest.raises(AttemptFailed) as failed:
            await one.carry_out()
        for difference in (
            "canonical: revision: 2 here, 1 there",
            "native: revision: 2 here, 1 there",
            "native: layout: vllm-b here, vllm-a there",
        ):
            assert difference in str(failed.value)
        assert failed.value.unsent and failed.value.avoid == (F,)
        assert not one.kvd.bodies and not one.node.bodies


async def test_a_prefix_is_copied_in_the_form_in_which_the_source_has_it() -> None:
    async with working() as one, peer() as target:
        add_native(one.fleet, A, F, B)
        fleet, source = one.fleet, NodeId("a/native")
        assert fleet.prefixes.add(member_of(fleet, A), source)
        chain = PromptHashes(prompt(LONG)).at(NATIVE_BLOCK)[:40]
        for seq, (group, held) in enumerate({"blocks": chain, "slots": chain[-1:]}.items()):
            event = HashEvent(seq, source, group, NATIVE_BLOCK, tuple(held), "stored")
            assert fleet.manager.apply(event)
        member_of(fleet, F).kvd_url = target.url
        answer = {"type": "pulled", "tokens": 640, "granted_bytes": 1}
        await target.script(PULL, answer)
        copy = CacheCopy(A, F, 640, 1000, 0.1)
        one.booking.route = one.booking.route._replace(copies=(copy,))
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, form="native"))
        await one.carry_out()
        (asked,) = await target.requested(PULL)
        assert asked["compat"] == msgspec.to_builtins(native_compat())
        assert asked["hashes"] == list(msgspec.to_builtins(tuple(chain)))
        assert one.hand_offs.copies.tallies["route"].made == 1
