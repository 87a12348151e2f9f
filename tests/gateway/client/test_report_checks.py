"""Reports of kvds: what is refused, and by which field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.contracts.kvd_api import MAX_GROUPS, EventPage, KvdReport
from prfaas.errors import MalformedResponse
from prfaas.gateway.client.report_checks import LONGEST_NAME, check_page, check_report
from prfaas.types import LinkStats, NodeId
from tests.gateway.reports import report

WHOLE = msgspec.to_builtins(report("n", native="vllm-a"))
FIRST, (SECOND,) = WHOLE["pool"], WHOLE["more_pools"]


def second(**changed: Any) -> dict[str, Any]:
    return {"more_pools": [{**SECOND, **changed}]}


def with_format(**changed: Any) -> dict[str, Any]:
    return second(compat={**SECOND["compat"], **changed})


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "a first pool with another name": ({"pool": {**FIRST, "name": "a"}}, "pool.name"),
    "a second pool of another member": (second(name="a/native"), "more_pools.0.name"),
    "a second pool with a member's name": (second(name="a"), "more_pools.0.name"),
    "a second pool with its node's name": (second(name="n"), "more_pools.0.name"),
    "a second pool without a name": (second(name=""), "more_pools.0.name"),
    "a second pool with the other form's name": (second(name="n/canonical"), "more_pools.0.name"),
    "two pools of one form": (with_format(layout="canonical"), "more_pools.0.compat.layout"),
    "another model": (with_format(model="other"), "more_pools.0.compat.model"),
    "another revision": (with_format(revision="2"), "more_pools.0.compat.revision"),
    "blocks of no tokens": (second(block_tokens=0), "more_pools.0.block_tokens"),
    "a format of no tokens": (with_format(block_tokens=0), "more_pools.0.compat.block_tokens"),
    "no groups": (second(groups=[]), "more_pools.0.groups"),
    "groups of one name": (second(groups=[SECOND["groups"][0]] * 2), "more_pools.0.groups"),
    "large pages": (second(page_bytes=2**50), "more_pools.0.page_bytes"),
    "many pages": (
        second(occupancy={**SECOND["occupancy"], "used_pages": 2**50}),
        "more_pools.0.occupancy",
    ),
    "a name of two lines": (with_format(layout="x\ny"), "more_pools.0.compat.layout"),
    "no first pool": ({"pool": None}, "more_pools"),
}


def read(changed: dict[str, Any]) -> KvdReport:
    body = msgspec.json.encode({**WHOLE, **changed})
    return check_report(msgspec.json.decode(body, type=KvdReport))


def link(**changed: Any) -> dict[str, Any]:
    return {"links": [{**msgspec.to_builtins(LinkStats("a:7400", 1.0, 1, 1e6, 0, 0)), **changed}]}


def first(**changed: Any) -> dict[str, Any]:
    return {"pool": {**FIRST, **changed}}


def engine(url: str) -> dict[str, Any]:
    return {"engines": [{"engine_id": "e", "url": url, "processes": 1}]}


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "a name with spaces": ({"node": "b a d"}, "node"),
    "no name": ({"node": ""}, "node"),
    "a long name": ({"node": "x" * 10_000}, "node"),
    "a name of two lines": ({"node": "x\ny"}, "node"),
    "a rate of 1e300": (link(goodput_bps=1e300), "links.0.goodput_bps"),
    "a rate below zero": (link(delivery_bps=-1.0), "links.0.delivery_bps"),
    "a backlog below zero": (link(backlog_bytes=-5), "links.0.backlog_bytes"),
    "many links": ({"links": link()["links"] * 5000}, "links"),
    "late for a year": ({"late_s": 3e7}, "late_s"),
    "an epoch below zero": ({"role": {"role": "both", "epoch": -1}}, "role.epoch"),
    "an engine's URL with a path": (engine("http://h:1/x?y=#"), "engines.0.url"),
    "an engine's URL that is not one": (engine("file:///etc/passwd"), "engines.0.url"),
    "blocks of no tokens": (first(block_tokens=0), "pool.block_tokens"),
    "no groups": (first(groups=[]), "pool.groups"),
    "groups of one name": (first(groups=[FIRST["groups"][0]] * 2), "pool.groups"),
    "a window of no tokens": (first(groups=[["window", "w", [0], 64, 0]]), "pool.groups"),
    "pages below zero": (first(page_bytes=-4096), "pool.page_bytes"),
    "pages beyond 64 bits": (
        first(page_bytes=2**50, occupancy={**FIRST["occupancy"], "used_pages": 2**50}),
        "pool.page_bytes",
    ),
    "many event names": ({"next_seq": {f"n{n}": 0 for n in range(50_000)}}, "next_seq"),
}


@pytest.mark.parametrize("problem", [*IMPOSSIBLE, *PROBLEMS])
def test_a_report_that_cannot_be_is_refused_by_its_field(problem: str) -> None:
    changed, field = (IMPOSSIBLE | PROBLEMS)[problem]
    with pytest.raises(MalformedResponse, match=f"malformed report: {field}: ") as refused:
        read(changed)
    assert len(str(refused.value)) < 800


def test_the_number_of_pools_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError, match="more_pools"):
        read({"more_pools": [SECOND] * 2})


def test_two_pools_of_one_node_are_accepted() -> None:
    assert [pool.compat.form for pool in read({}).pools] == ["canonical", "native"]
    named = read({"pool": {**FIRST, "name": "n"}})
    assert [pool.name for pool in named.pools] == ["n", "n/native"]
    native = {**SECOND, "name": ""}
    canonical = {**FIRST, "name": "n/canonical"}
    swapped = read({"pool": native, "more_pools": [canonical]})
    assert [pool.compat.form for pool in swapped.pools] == ["native", "canonical"]
    assert not read({"more_pools": []}).more_pools


def test_the_longest_name_of_a_node_allows_a_second_pool() -> None:
    long = "n" * LONGEST_NAME
    found = read({"node": long, "next_seq": {long: 0, f"{long}/native": 0}, "more_pools": [
        {**SECOND, "name": f"{long}/native"}
    ]})  # fmt: skip
    assert found.more_pools[0].name == f"{long}/native"


def test_the_groups_of_a_snapshot_are_bounded() -> None:
    def page(groups: int) -> EventPage:
        return EventPage(NodeId("n"), "first", 1, (), {f"g{n}": () for n in range(groups)})

    check_page(page(MAX_GROUPS), NodeId("n"))
    with pytest.raises(MalformedResponse, match="snapshot: has more than 256 groups"):
        check_page(page(MAX_GROUPS + 1), NodeId("n"))
