"""Two kvds with an engine of two forms on each: both forms side by side, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.contracts.forms import compats_of
from prfaas.contracts.kvd_api import (
    EventPage,
    KvdReport,
    MatchPrefix,
    OpenTransfer,
    PullPrefix,
    PushPrefix,
    spec_of,
)
from prfaas.errors import InputError
from prfaas.kvd.store import StoreOptions
from prfaas.types import Compat, Form
from tests.kvd.forms.engines import (
    COMPATS,
    FORMS,
    NATIVE,
    NATIVE_SPEC,
    SPECS,
    EngineOfTwoForms,
    assert_state,
    engine,
    write,
)
from tests.kvd.hosts import COMPAT, Host, begun, fill, kvd, names, prompt_of
from tests.waiting import PATIENCE_S, wait_until

TOKENS = 40
PROMPT = prompt_of(TOKENS)
OTHER: dict[Form, Form] = {"native": "canonical", "canonical": "native"}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """The prefill side's kvd and the decode side's."""
    with kvd(tmp_path, name="p", node="p") as here, kvd(tmp_path, name="d", node="d") as there:
        yield here, there


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with kvd(tmp_path, node="h") as host:
        yield host


def report(host: Host) -> KvdReport:
    return msgspec.convert(host.stats(), KvdReport)


def metric(host: Host, name: str) -> float:
    lines = host.get("/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


def test_each_form_of_one_prompt_arrives_in_its_own_pool(pair: tuple[Host, Host]) -> None:
    here, there = pair
    with engine(here) as prefill, engine(there) as decode:
        grants = {form: there.grant(PROMPT, compat=COMPATS[form]) for form in FORMS}
        for form, grant in grants.items():
            assert grant.form == form and set(grant.skip_tokens.values()) <= {0}
            write(prefill, form, PROMPT, grant)
        for form, grant in grants.items():
            assert there.settled(grant)["state"] == "committed"
            with decode[form].attach(grant.transfer_id) as found:
                assert_state(found, form, PROMPT)
        assert here.in_use() == there.in_use() == (0, 0)
        for client in FORMS:  # what was kept has the same hashes in both pools
            with begun(decode[client].pin(names(PROMPT))) as found:
                assert_state(found, client, PROMPT)
        for form in FORMS:
            assert there.in_use() == (0, 0)
            grant = there.grant(PROMPT, compat=COMPATS[form])
            assert grant.max_bytes == 0
            decode[form].attach(grant.transfer_id).release()
            assert metric(there, f'prfaas_kvd_committed_transfers_total{{form="{form}"}}') == 2
            assert metric(there, f'prfaas_kvd_pool_lookups_total{{form="{form}"}}') == 3


def test_the_report_has_both_pools_and_counts_processes(host: Host) -> None:
    with engine(host), engine(host), engine(host, "another"):
        found = report(host)
        assert [(one.engine_id, one.processes) for one in found.engines] == [
            ("engine", 2),
            ("another", 1),
        ]
        assert [pool.name for pool in found.pools] == ["h", "h/native"]
        assert compats_of(found) == (COMPAT, NATIVE)
        assert [spec_of(pool.groups) for pool in found.pools] == [*SPECS.values()]
        native = found.pools[1]
        free = metric(host, 'prfaas_kvd_pool_memory_bytes{form="native",state="free"}')
        assert free == (native.occupancy.capacity_pages or 0) * native.page_bytes


@pytest.mark.parametrize("form", FORMS)
def test_a_transfer_is_attached_in_its_own_form_only(pair: tuple[Host, Host], form: Form) -> None:
    here, there = pair
    with engine(here) as prefill, engine(there) as decode:
        grant = there.grant(PROMPT, compat=COMPATS[form])
        write(prefill, form, PROMPT, grant)
        assert there.settled(grant)["state"] == "committed"
        wrong = rf"is of the {form} form, and this connection of the {OTHER[form]} form; attach it"
        with pytest.raises(InputError, match=wrong):
            decode[OTHER[form]].attach(grant.transfer_id)
        with decode[form].attach(grant.transfer_id) as found:
            assert_state(found, form, PROMPT)
        assert there.in_use() == (0, 0)


@pytest.mark.parametrize("form", FORMS)
def test_a_grant_is_filled_in_its_own_form_only(pair: tuple[Host, Host], form: Form) -> None:
    here, there = pair
    with engine(here) as prefill, engine(there):
        grant = there.grant(PROMPT, compat=COMPATS[form])
        wrong = f"takes the {form} form, and this pool has the {OTHER[form]} form"
        with pytest.raises(InputError, match=wrong):
            prefill[OTHER[form]].begin(names(PROMPT), TOKENS, grant=grant)
        write(prefill, OTHER[form], PROMPT)
        status, body = here.post(
            "/v1/push", PushPrefix(tuple(names(PROMPT)), COMPATS[OTHER[form]], grant)
        )
        assert status == 400 and wrong.encode() in body
        assert here.in_use() == (0, 0)
        write(prefill, form, PROMPT, grant)
        assert there.settled(grant)["state"] == "committed"


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_joins_a_lease_of_its_form_only(host: Host, form: Form) -> None:
    """The pages of the ticket are of one arena; in the other one they are another request's."""
    with engine(host) as scheduler, engine(host) as worker:
        lease = begun(scheduler[form].begin(names(PROMPT), TOKENS))
        for join in (worker[OTHER[form]].join_write, worker[OTHER[form]].join_read):
            with pytest.raises(InputError, match=f"is of the {form} form.*join on the connection"):
                join(lease.ticket)
        fill(worker[form].join_write(lease.ticket), PROMPT, spec=SPECS[form])
        worker[form].flush()
        lease.commit()
        with begun(scheduler[form].pin(names(PROMPT))) as found:
            assert_state(found, form, PROMPT)


def test_leases_end_with_the_connection_of_their_form(host: Host) -> None:
    with engine(host) as process:
        kept = begun(process.canonical.begin(names(PROMPT), TOKENS))
        begun(process.native.begin(names(PROMPT), TOKENS))
        assert host.in_use()[1] == 2
        process.native.close()
        wait_until(lambda: host.in_use()[1] == 1)
        fill(kept, PROMPT)
        kept.commit()
        assert [one["processes"] for one in host.stats()["engines"]] == [1]
        with begun(process.canonical.pin(names(PROMPT))) as found:
            assert_state(found, "canonical", PROMPT)


# Formats that this kvd does not have --------------------------------------------------------------


def test_another_format_is_refused_with_what_this_kvd_takes(host: Host) -> None:
    other = msgspec.structs.replace(NATIVE, layout="vllm-HND")
    hashes = tuple(names(PROMPT))
    bodies: dict[str, msgspec.Struct] = {
        "/v1/open": OpenTransfer(hashes, TOKENS, other),
        "/v1/match": MatchPrefix(hashes, other),
        "/v1/pull": PullPrefix("http://127.0.0.1:1", hashes, compat=other),
    }
    with engine(host) as process:
        bodies["/v1/push"] = PushPrefix(hashes, other, host.grant(PROMPT))
        for path, body in bodies.items():
            status, answer = host.post(path, body)
            problem = json.loads(answer)
            assert (status, problem["code"]) == (409, "incompatible"), (path, problem)
            assert problem["differences"] == ["layout: vllm-NHD here, vllm-HND there"]
            takes = "it takes the canonical form (canonical) and the native form (vllm-NHD)"
            assert problem["message"].endswith(takes)
        with pytest.raises(InputError, match="layout: vllm-NHD here, vllm-HND there"):
            host.engine("third", NATIVE_SPEC, compat=other, whole_blocks=True)
        assert process.native.connected


def test_a_kvd_with_one_form_refuses_the_other(host: Host) -> None:
    with host.engine():
        status, body = host.post("/v1/open", OpenTransfer(tuple(names(PROMPT)), TOKENS, NATIVE))
        problem = json.loads(body)
        assert status == 409 and problem["message"].endswith(
            "it takes the canonical form (canonical)"
        )
        assert "layout: canonical here, vllm-NHD there" in problem["differences"]


# Prefixes ----------------------------------------------------------------------------------------


def pull(to: Host, source: Host, compat: Compat | None) -> dict[str, Any]:
    status, body = to.post("/v1/pull", PullPrefix(source.url, tuple(names(PROMPT)), compat=compat))
    assert status == 200, body
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


def matched(host: Host, compat: Compat | None) -> int:
    status, body = host.post("/v1/match", MatchPrefix(tuple(names(PROMPT)), compat))
    assert status == 200, body
    return int(json.loads(body)["tokens"])


@pytest.mark.parametrize("form", FORMS)
def test_a_pull_copies_the_prefix_of_one_form(pair: tuple[Host, Host], form: Form) -> None:
    here, there = pair
    with engine(here) as source, engine(there) as target:
        for one in FORMS:
            write(source, one, PROMPT)
        assert pull(there, here, COMPATS[form])["tokens"] == TOKENS
        assert there.received_bytes() == SPECS[form].kv_bytes(TOKENS)
        assert (matched(there, COMPATS[form]), matched(there, COMPATS[OTHER[form]])) == (TOKENS, 0)
        with begun(target[form].pin(names(PROMPT))) as found:
            assert_state(found, form, PROMPT)
        assert pull(there, here, COMPATS[form])["granted_bytes"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_prefix_of_the_other_form_is_not_pulled(pair: tuple[Host, Host], form: Form) -> None:
    """The source has the hashes, but not the bytes."""
    here, there = pair
    with engine(here) as source, engine(there):
        write(source, OTHER[form], PROMPT)
        assert matched(here, COMPATS[OTHER[form]]) == TOKENS and matched(here, COMPATS[form]) == 0
        assert pull(there, here, COMPATS[form]) == {
            "type": "pulled",
            "tokens": 0,
            "granted_bytes": 0,
        }


def test_a_pull_without_a_format_is_for_the_first_pool(pair: tuple[Host, Host]) -> None:
    """The source has these hashes in its other pool, whose bytes would be wrong here."""
    here, there = pair
    with engine(here) as source, engine(there) as target:
        write(source, "native", PROMPT)
        assert matched(here, None) == 0 and pull(there, here, None)["tokens"] == 0
        write(source, "canonical", PROMPT)
        assert matched(here, None) == TOKENS and pull(there, here, None)["tokens"] == TOKENS
        with begun(target.canonical.pin(names(PROMPT))) as found:
            assert_state(found, "canonical", PROMPT)
        assert matched(there, NATIVE) == 0


# Cache events ------------------------------------------------------------------------------------


def page(host: Host, node: str, since: int, wait_s: float = 0.0) -> EventPage:
    status, body = host.get(f"/v1/events?node={node}&since={since}&wait_s={wait_s}")
    assert status == 200, body
    return msgspec.json.decode(body, type=EventPage)


def test_events_of_each_pool_are_served_under_its_name(host: Host) -> None:
    nodes: dict[str, Form] = {"h": "canonical", "h/native": "native"}
    with engine(host) as process:
        for node, form in nodes.items():
            assert page(host, node, 0).events == ()
            write(process, form, PROMPT)
            found = page(host, node, 0, PATIENCE_S)
            groups = {event.group for event in found.events}
            assert groups == {group.name for group in SPECS[form].groups}
            assert {event.node for event in found.events} == {node}
            assert found.next_seq == len(found.events) == host.stats()["next_seq"][node]
        for node, form in nodes.items():
            for since in (-1, 10_000):  # a snapshot, and numbers that this process has not given
                snapshot = page(host, node, since).snapshot
                assert snapshot is not None and set(snapshot) == {
                    group.name for group in SPECS[form].groups
                }
                assert len(snapshot[SPECS[form].groups[0].name]) == len(names(PROMPT))
        assert page(host, "h/canonical", -1).snapshot == {}, "no pool has this name"


def test_an_engine_publishes_for_the_pool_of_its_connection(host: Host) -> None:
    """And keeps its events while one of its connections lives."""
    payload = msgspec.msgpack.encode(
        [
            0.0,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [7],
                    "parent_block_hash": None,
                    "token_ids": PROMPT[:4],
                    "block_size": 4,
                }
            ],
            0,
        ]
    )
    with engine(host) as process:
        process.native.publish(payload, {0: "kv"}, 4)
        process.canonical.close()
        wait_until(lambda: len(host.stats()["engines"]) == 1)
        snapshot = page(host, "engine", -1).snapshot
        assert snapshot is not None and len(snapshot["kv"]) == 1


# Restarts ----------------------------------------------------------------------------------------


def hand_over(host: Host, process: EngineOfTwoForms, form: Form, prompt: list[int]) -> None:
    """From a kvd to itself."""
    grant = host.grant(prompt, compat=COMPATS[form])
    write(process, form, prompt, grant)
    assert host.settled(grant)["state"] == "committed"
    with process[form].attach(grant.transfer_id) as found:
        assert_state(found, form, prompt)


def test_both_forms_come_back_after_a_restart_of_the_kvd(tmp_path: Path) -> None:
    with ExitStack() as clients:
        with kvd(tmp_path, node="h") as host:
            process = clients.enter_context(engine(host))
            before = host.stats()["instance"]
            for form in FORMS:
                hand_over(host, process, form, PROMPT)
        with kvd(tmp_path, node="h") as host:
            wait_until(lambda: len(host.stats()["more_pools"]) == 1)
            assert host.stats()["instance"] != before
            assert {*compats_of(report(host))} == {COMPAT, NATIVE}
            found = {pool.name for pool in report(host).pools}
            assert found in ({"h", "h/native"}, {"h", "h/canonical"})
            for form in FORMS:
                hand_over(host, process, form, PROMPT)


# Memory ------------------------------------------------------------------------------------------


def test_two_forms_fill_one_memory_and_both_go_on(tmp_path: Path) -> None:
    memory = 96_000
    with kvd(tmp_path, store=StoreOptions(memory_bytes=memory)) as host, engine(host) as process:
        for seed in range(14):
            for form in FORMS:
                hand_over(host, process, form, prompt_of(TOKENS, seed))
        found = report(host).pools
        assert all(pool.counters.evicted_blocks for pool in found)
        sizes = [pool.occupancy.used_pages * pool.page_bytes for pool in found]
        assert 0.8 * memory < sum(sizes) <= memory
        assert host.in_use() == (0, 0)
