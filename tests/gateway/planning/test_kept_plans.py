"""The plan of gateways that are not elected, as the kvds keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from prfaas.config import Deployment
from prfaas.contracts.kvd_api import MAX_RECORD_BYTES, RecordVersion
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.planning.coordination import Alone
from prfaas.gateway.planning.kept_plans import PLAN, KeptPlans, stated_inputs
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId
from tests.gateway.homes.regions import E0, EAST, WEST, Regions, regions
from tests.gateway.planning.kept import Gateway, Site, kept_at


class OnlyGateway:
    def __init__(
        self,
        site: Site,
        made: Regions,
        *,
        plans: bool = True,
        resumes: bool = True,
        deployment: Deployment | None = None,
    ) -> None:
        self.gateway: Gateway = site.gateway([PLAN])
        records, deployment = self.gateway.records, deployment or made.deployment
        kept = KeptPlans(records, deployment, made.network, site.clock)
        traffic = HomeTraffic([EAST, WEST], 0.0, 60.0)
        self.alone = Alone(traffic.histories, kept, plans=plans, resumes=resumes)

    async def newer(self) -> Mapping[ClusterId, Plan] | None:
        await self.gateway.step()
        return self.alone.newer_plans()


def with_threshold(made: Regions, tokens: int) -> dict[ClusterId, Plan]:
    return {home: replace(p, threshold_tokens=tokens) for home, p in made.router.plans.items()}


def versions(site: Site) -> set[tuple[int, int]]:
    found: list[RecordVersion | None] = list(kept_at(site, PLAN).values())
    return {(one.epoch, one.number) for one in found if one is not None}


async def test_the_only_gateway_starts_with_the_plan_that_it_had_and_goes_on_from_there() -> None:
    site, made = Site(3), regions(Site(0).clock)
    first = OnlyGateway(site, made)
    assert not first.alone.is_informed
    assert await first.newer() is None and first.alone.is_informed
    for tokens in (5_000, 6_000):
        first.alone.share(with_threshold(made, tokens), [E0])
        await first.gateway.step()
    assert versions(site) == {(0, 2)}
    second = OnlyGateway(site, made)
    found = await second.newer()
    assert found is not None and found[EAST].threshold_tokens == 6_000
    assert second.alone.draining() == (), "it decides itself which nodes drain"
    second.alone.share(found, [E0])
    await second.gateway.step()
    assert versions(site) == {(0, 2)}, "nothing has changed"
    second.alone.share(with_threshold(made, 7_000), [])
    await second.gateway.step()
    assert versions(site) == {(0, 3)}
    assert await second.newer() is None, "its own plan is no news"


async def test_after_elected_gateways_the_only_one_goes_on_with_their_epoch() -> None:
    site, made = Site(3), regions(Site(0).clock)
    elected = OnlyGateway(site, made)
    await elected.newer()
    kept = KeptPlans(elected.gateway.records, made.deployment, made.network, site.clock)
    kept.share(with_threshold(made, 5_000), [], 7)
    await elected.gateway.step()
    for kvd in site.kvds.values():
        kvd.promised_epoch = 9
    only = OnlyGateway(site, made)
    await only.newer()
    only.alone.share(with_threshold(made, 6_000), [])
    await only.gateway.step()
    assert versions(site) == {(7, 2)}


async def test_a_gateway_that_does_not_plan_follows_each_plan_and_its_draining_nodes() -> None:
    site, made = Site(3), regions(Site(0).clock)
    planner, other = OnlyGateway(site, made), OnlyGateway(site, made, plans=False)
    await planner.newer()
    for tokens in (5_000, 6_000):
        planner.alone.share(with_threshold(made, tokens), [E0])
        await planner.gateway.step()
        found = await other.newer()
        assert found is not None and found[WEST].threshold_tokens == tokens
    assert list(other.alone.draining()) == [NodeId("e0")]
    assert await other.newer() is None


async def test_a_plan_for_other_inputs_is_no_start_but_its_number_counts() -> None:
    site, made = Site(3), regions(Site(0).clock)
    first = OnlyGateway(site, made)
    await first.newer()
    first.alone.share(with_threshold(made, 5_000), [])
    await first.gateway.step()
    link = msgspec.structs.replace(made.deployment.links[0], gbps=1.0)
    links = [link, *made.deployment.links[1:]]
    changed = msgspec.structs.replace(made.deployment, links=links)
    second = OnlyGateway(site, made, deployment=changed)
    assert await second.newer() is None and second.alone.is_informed
    second.alone.share(with_threshold(made, 6_000), [])
    await second.gateway.step()
    assert versions(site) == {(0, 2)}


async def test_a_gateway_that_advises_does_not_resume() -> None:
    site, made = Site(3), regions(Site(0).clock)
    first = OnlyGateway(site, made)
    await first.newer()
    first.alone.share(with_threshold(made, 5_000), [])
    await first.gateway.step()
    assert await OnlyGateway(site, made, resumes=False).newer() is None


def test_nodes_that_come_and_go_are_no_other_inputs() -> None:
    made = regions(Site(0).clock).deployment
    clusters = [msgspec.structs.replace(one, nodes=[]) for one in made.clusters]
    assert stated_inputs(made) == stated_inputs(msgspec.structs.replace(made, clusters=clusters))
    slo = msgspec.structs.replace(made.slo, output_tokens_per_s=1.0)
    assert stated_inputs(made) != stated_inputs(msgspec.structs.replace(made, slo=slo))


async def test_a_plan_that_no_record_can_hold_is_followed_here() -> None:
    site, made = Site(3), regions(Site(0).clock)
    only = OnlyGateway(site, made)
    await only.newer()
    roles = {NodeId(f"{number}".zfill(256)): "prefill" for number in range(MAX_RECORD_BYTES // 256)}
    plans = {home: replace(p, roles=roles) for home, p in made.router.plans.items()}  # type: ignore[arg-type]
    only.alone.share(plans, [])
    await only.gateway.step()
    assert versions(site) == set()
