"""Tenants share the pool of a kvd: what one keeps does not depend on the prompts of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from prfaas.contracts.kvd_api import MatchPrefix, PrefixMatch, PullPrefix
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.store import StoreOptions
from tests.cache.builders import BLOCK
from tests.kvd.hosts import Host, begun, fill, kvd, names, prompt_of

TOKENS = 10 * BLOCK
OWN = prompt_of(TOKENS)
FLOOD = 60  # distinct prompts, a multiple of what the pool holds

SMALL = StoreOptions(memory_bytes=1 << 14)


def prefill(
    engine: KvdClient, prompt: Sequence[int], decode: Host | None = None, tenant: str = ""
) -> None:
    """A hand-off to `decode`, which an engine reads; without it a prompt of the engine's own."""
    if decode is None:
        lease = begun(engine.begin(names(prompt), len(prompt), tenant=tenant))
    else:
        grant = decode.grant(prompt, tenant=tenant)
        lease = begun(engine.begin(names(prompt), len(prompt), grant=grant))
    fill(lease, prompt)
    lease.commit()
    if decode is not None:
        assert decode.settled(grant)["state"] == "committed"
        with decode.engine("reader") as reader:
            reader.attach(grant.transfer_id).release()


def cached_tokens(host: Host, prompt: Sequence[int]) -> int:
    with host.engine("looks") as engine:
        found = begun(engine.pin(names(prompt)))
        found.release()
    return found.tokens


def flood(engine: KvdClient, decode: Host | None = None) -> None:
    for number in range(1, FLOOD + 1):
        prefill(engine, prompt_of(TOKENS, seed=number), decode, tenant="flood")


def evicted(host: Host) -> int:
    counted = host.stats()["pool"]["counters"]["evicted_blocks"]
    assert isinstance(counted, int)
    return counted


def test_a_flood_of_prompts_leaves_the_prefix_of_another_tenant(tmp_path: Path) -> None:
    with kvd(tmp_path, store=SMALL) as host, host.engine() as engine:
        prefill(engine, OWN, tenant="own")
        flood(engine)
        assert evicted(host) > 100
        assert cached_tokens(host, OWN) == TOKENS
        # A prompt of the conversation counts for the same tenant, also where no tag says so.
        longer = OWN + prompt_of(BLOCK, seed=500)
        prefill(engine, longer)
        flood(engine)
        assert cached_tokens(host, longer) == len(longer)


def test_a_flood_of_hand_offs_leaves_the_prefix_of_another_tenant_on_both_hosts(
    tmp_path: Path,
) -> None:
    """The sender's engine knows the tenant from the grant."""
    with (
        kvd(tmp_path, name="far", store=SMALL) as far,
        kvd(tmp_path, name="near", store=SMALL) as near,
        far.engine() as engine,
        near.engine(),
    ):
        prefill(engine, OWN, near, tenant="own")
        flood(engine, near)
        for host in (far, near):
            assert evicted(host) > 100
            assert cached_tokens(host, OWN) == TOKENS


def test_a_copied_prefix_belongs_to_the_tenant_that_it_belonged_to(tmp_path: Path) -> None:
    with (
        kvd(tmp_path, name="source", store=SMALL) as source,
        kvd(tmp_path, name="target", store=SMALL) as target,
        source.engine() as first,
        target.engine() as second,
    ):
        prefill(first, OWN, tenant="own")
        status, body = target.post("/v1/pull", PullPrefix(source.url, tuple(names(OWN))))
        assert status == 200, body
        status, body = target.post("/v1/match", MatchPrefix(tuple(names(OWN))))
        assert msgspec.json.decode(body, type=PrefixMatch).tenant == "own"
        flood(second)
        assert cached_tokens(target, OWN) == TOKENS
