"""Two kvds and an engine on each: the way of a hand-off, byte by byte."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.contracts.kvd_api import PushPrefix
from prfaas.errors import TransferFailed
from prfaas.kvspec import Segment, segment_bytes
from prfaas_lab.testing.certificates import make_certificates
from tests.cache.builders import SPECS
from tests.kvd.hosts import (
    COMPAT,
    SPEC,
    Host,
    assert_holds,
    begun,
    fill,
    kvd,
    names,
    prompt_of,
)
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """The prefill side's kvd and the decode side's."""
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d") as there:
        yield here, there


def test_every_byte_arrives_and_only_new_bytes_are_sent(pair: tuple[Host, Host]) -> None:
    here, there = pair
    prompt = prompt_of(42)
    with here.engine() as prefill, there.engine() as decode:
        grant = there.grant(prompt, checkpoint_tokens=40)
        assert there.transfer(grant)["state"] == "granted"
        lease = begun(prefill.begin(names(prompt), 42, grant=grant))
        fill(lease, prompt)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        lease.sent.result(PATIENCE_S)
        with decode.attach(grant.transfer_id) as found:
            assert found.tokens == 42
            assert_holds(found, prompt, 42)
        first = there.received_bytes()
        assert first > SPEC.kv_bytes(42)  # the checkpoint's windows and states beside
        assert there.in_use() == (0, 0)

        longer = [*prompt, *prompt_of(20, seed=1)]
        grant = there.grant(longer)
        assert grant.skip_tokens == {"full0": 40, "full1": 40}
        lease = begun(prefill.begin(names(longer), len(longer), grant=grant))
        assert lease.match_tokens == 40
        assert_holds(lease, longer, 40)
        fill(lease, longer)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        assert there.received_bytes() - first == SPEC.kv_bytes(62, 40)
        with decode.attach(grant.transfer_id) as found:
            assert_holds(found, longer, 62)
        assert here.in_use() == there.in_use() == (0, 0)


def test_a_cached_prefix_is_sent_before_the_engine_computes(pair: tuple[Host, Host]) -> None:
    here, there = pair
    prompt = prompt_of(30)
    with here.engine() as prefill, there.engine() as decode:
        begin = begun(prefill.begin(names(prompt[:24]), 24))
        fill(begin, prompt[:24])
        begin.commit()
        grant = there.grant(prompt)
        lease = begun(prefill.begin(names(prompt), 30, grant=grant))
        assert lease.match_tokens == 24
        found = SPEC.kv_bytes(24) - SPEC.kv_bytes(24, 24)  # attention of 24 tokens
        wait_until(lambda: there.received_bytes() == found)
        fill(lease, prompt)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        assert there.received_bytes() == SPEC.kv_bytes(30)
        with decode.attach(grant.transfer_id) as state:
            assert_holds(state, prompt, 30)


def test_chunks_are_sent_while_later_ones_are_computed(pair: tuple[Host, Host]) -> None:
    here, there = pair
    prompt = prompt_of(40)
    with here.engine() as prefill, there.engine():
        grant = there.grant(prompt)
        lease = begun(prefill.begin(names(prompt), 40, grant=grant))
        fill(lease, prompt, stop=16)
        growing = SPEC.kv_bytes(16) - SPEC.kv_bytes(16, 16)
        wait_until(lambda: there.received_bytes() == growing)
        assert there.transfer(grant)["state"] == "granted"
        lease.abort("the client has gone")
        assert "the client has gone" in there.settled(grant)["reason"]
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_blocks_that_the_receiver_has_are_not_sent(pair: tuple[Host, Host]) -> None:
    here, there = pair
    prompt = prompt_of(40)
    with here.engine() as prefill, there.engine() as decode:
        kept = begun(decode.begin(names(prompt), 40))
        fill(kept, prompt)
        kept.commit()
        grant = there.grant(prompt)
        assert grant.max_bytes == 0
        assert there.transfer(grant)["state"] == "committed"
        lease = begun(prefill.begin(names(prompt), 40, grant=grant))
        lease.sent.result(PATIENCE_S)
        lease.abort("nothing to compute for")
        with decode.attach(grant.transfer_id) as state:
            assert_holds(state, prompt, 40)
        assert there.received_bytes() == 0
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_opaque_blocks_are_sent_whole(pair: tuple[Host, Host]) -> None:
    here, there = pair
    spec = SPECS["windowed"]
    compat = msgspec.structs.replace(COMPAT, layout="opaque")
    options: dict[str, Any] = {"spec": spec, "compat": compat, "whole_blocks": True}
    prompt = prompt_of(10)
    wanted = [Segment("full0", layer, 0, 12) for layer in (0, 2)]
    wanted.append(Segment("window0", 3, 4, 12))
    with here.engine(**options) as prefill, there.engine(**options) as decode:
        grant = there.grant(prompt, compat=compat)
        lease = begun(prefill.begin(names(prompt), 10, checkpoint_tokens=(), grant=grant))
        content = {s: random.Random(s.name).randbytes(segment_bytes(spec, s)) for s in wanted}
        for segment, data in content.items():
            for view in lease.buffers(segment):
                view[:], data = data[: view.nbytes], data[view.nbytes :]
            lease.ready(segment)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        with decode.attach(grant.transfer_id) as state:
            for segment, data in content.items():
                assert b"".join(state.views(segment)) == data


def test_under_tls(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "certs").identity()
    prompt = prompt_of(20)
    with kvd(tmp_path, name="p", tls=tls) as here, kvd(tmp_path, name="d", tls=tls) as there:
        with here.engine() as prefill, there.engine() as decode:
            grant = there.grant(prompt)
            lease = begun(prefill.begin(names(prompt), 20, grant=grant))
            fill(lease, prompt)
            lease.commit()
            assert there.settled(grant)["state"] == "committed"
            with decode.attach(grant.transfer_id) as state:
                assert_holds(state, prompt, 20)


def test_many_at_once_with_shared_prefixes_and_aborts(pair: tuple[Host, Host]) -> None:
    here, there = pair
    shared = prompt_of(24)

    def one(number: int) -> str:
        prompt = [*shared, *prompt_of(5 + number % 17, seed=number)]
        grant = there.grant(prompt)
        lease = begun(prefill.begin(names(prompt), len(prompt), grant=grant))
        if number % 5 == 0:
            fill(lease, prompt, stop=24)
            lease.abort("changed my mind")
            return str(there.settled(grant)["state"])
        fill(lease, prompt)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        with decode.attach(grant.transfer_id) as state:
            assert_holds(state, prompt, len(prompt))
        return "read"

    with here.engine() as prefill, there.engine() as decode, ThreadPoolExecutor(10) as threads:
        outcomes = Counter(threads.map(one, range(50)))
        assert outcomes == {"read": 40, "failed": 10}
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_a_grant_that_comes_twice_harms_no_lease_of_the_engine(pair: tuple[Host, Host]) -> None:
    """The connection of the engine lives on, and so do its other leases."""
    here, there = pair
    prompt, other = prompt_of(40), prompt_of(40, seed=1)
    with here.engine() as prefill, there.engine() as decode:
        bystander = begun(prefill.begin(names(other), 40))
        grant = there.grant(prompt)
        lease = begun(prefill.begin(names(prompt), 40, grant=grant))
        before = here.in_use()
        with pytest.raises(TransferFailed, match="is being sent"):
            prefill.begin(names(prompt), 40, grant=grant)
        assert here.in_use() == before
        fill(lease, prompt)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        with decode.attach(grant.transfer_id) as state:
            assert_holds(state, prompt, 40)
        lease.sent.result(PATIENCE_S)
        with pytest.raises(TransferFailed, match="has ended"):
            prefill.begin(names(prompt), 40, grant=grant)
        fill(bystander, other)
        bystander.commit()
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_a_push_that_a_proxy_repeats_is_answered_twice_and_sent_once(
    pair: tuple[Host, Host],
) -> None:
    here, there = pair
    prompt = prompt_of(40)
    with here.engine() as prefill, there.engine():
        lease = begun(prefill.begin(names(prompt), 40, checkpoint_tokens=()))
        fill(lease, prompt)
        lease.commit()
        with socket.create_server(("127.0.0.1", 0)) as mute:  # the transfer stays under way
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            grant = msgspec.structs.replace(there.grant(prompt), data_address=address)
            push = PushPrefix(tuple(names(prompt)), COMPAT, grant)
            for _ in range(3):
                assert here.post("/v1/push", push) == (200, b'{"type":"pushing"}')
                assert here.in_use()[1] == 1
            other = msgspec.structs.replace(push, hashes=push.hashes[:5])
            status, body = here.post("/v1/push", other)
            assert status == 502 and b"is being sent" in body
            assert here.in_use()[1] == 1
