from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import msgspec
import pytest

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import block_hashes
from prfaas.cache.index import NodeInfo, PrefixIndex
from prfaas.config.address import Address
from prfaas.contracts.kvd_api import EventPage, MatchPrefix, OpenTransfer, Role
from prfaas.errors import InputError
from prfaas.security.shared_key import SharedKey
from prfaas.types import ClusterId, NotNow, TransferId
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, SPEC, Host, begun, fill, kvd, names, prompt_of
from tests.waiting import PATIENCE_S, wait_until

PROMPT = prompt_of(40)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with kvd(tmp_path, node="pool") as host:
        yield host


def keep(host: Host, prompt: list[int]) -> None:
    with host.engine() as engine:
        lease = begun(engine.begin(names(prompt), len(prompt)))
        fill(lease, prompt)
        lease.commit()


def page(host: Host, query: str) -> EventPage:
    status, body = host.get(f"/v1/events?{query}")
    assert status == 200, body
    return msgspec.json.decode(body, type=EventPage)


def test_before_any_engine_nothing_is_granted(host: Host) -> None:
    refused = host.open(PROMPT)
    assert isinstance(refused, NotNow) and "no engine has registered" in refused.reason
    assert host.stats()["pool"] is None
    assert host.get("/health") == (200, b"ok")


def test_a_grant_is_refused_with_the_differences_named(host: Host) -> None:
    with host.engine():
        other = msgspec.structs.replace(COMPAT, layout="vllm-cpu", revision="2")
        asked = OpenTransfer(tuple(names(PROMPT)), 40, other)
        status, body = host.post("/v1/open", asked)
        problem = json.loads(body)
        assert status == 409 and problem["code"] == "incompatible"
        assert problem["differences"] == [
            "revision: 1 here, 2 there",
            "layout: canonical here, vllm-cpu there",
        ]
        assert host.in_use() == (0, 0)


def test_bad_requests_are_one_line(host: Host) -> None:
    with host.engine():
        for path, body, problem in (
            ("/v1/open", {"hashes": []}, "not a valid OpenTransfer"),
            ("/v1/open", OpenTransfer((b"x",), 40, COMPAT), "1 block hashes for 40 tokens"),
            ("/v1/role", {"role": "cook", "epoch": 0}, "cook"),
        ):
            status, answer = host.post(path, body)
            assert status == 400 and problem in json.loads(answer)["message"], answer
        assert host.get("/v1/transfers/x?wait_s=soon")[0] == 400
        status, answer = host.get(f"/v1/events?since={'9' * 5_000}")
        assert status == 400 and len(answer) < 500, "it does not repeat a long value"
        assert host.get("/v1/transfers/unknown")[0] == 404
        assert host.post("/v1/transfers/unknown/abort", {})[0] == 404


def test_an_open_with_an_id_can_be_repeated_and_aborted_at_any_time(host: Host) -> None:
    with host.engine():
        ids = [str(uuid.uuid4()) for _ in range(2)]
        first = OpenTransfer(tuple(names(PROMPT)), 40, COMPAT, transfer_id=TransferId(ids[0]))
        status, body = host.post("/v1/open", first)
        assert status == 200 and json.loads(body)["transfer_id"] == ids[0]
        before = host.in_use()
        assert host.post("/v1/open", first) == (200, body) and host.in_use() == before
        other = msgspec.structs.replace(first, checkpoint_tokens=8)
        status, answer = host.post("/v1/open", other)
        assert (status, json.loads(answer)["code"]) == (400, "bad_request")
        assert b"transfer_id" in answer and host.in_use() == before
        assert host.post(f"/v1/transfers/{ids[0]}/abort", {})[0] == 200
        wait_until(lambda: host.in_use() == (0, 0))
        # The abort of the second transfer overtakes its open.
        status, answer = host.post(f"/v1/transfers/{ids[1]}/abort", {})
        assert status == 200 and json.loads(answer)["state"] == "failed"
        for ended in ids:
            late = msgspec.structs.replace(first, transfer_id=TransferId(ended))
            status, answer = host.post("/v1/open", late)
            assert (status, json.loads(answer)["code"]) == (409, "ended")
        bad = msgspec.structs.replace(first, transfer_id=TransferId("t-1"))
        assert host.post("/v1/open", bad)[0] == 400
        assert host.in_use() == (0, 0)


def test_match_pins_nothing(host: Host) -> None:
    asked = MatchPrefix(tuple(names(PROMPT)))
    assert json.loads(host.post("/v1/match", asked)[1])["tokens"] == 0
    keep(host, PROMPT)
    assert json.loads(host.post("/v1/match", asked)[1]) == {
        "tokens": 40,
        "attention_tokens": 40,
        "tenant": "",
    }
    assert host.in_use() == (0, 0)


def test_a_role_change_must_name_the_current_epoch(host: Host) -> None:
    assert json.loads(host.get("/v1/role")[1]) == {"role": "both", "epoch": 0}
    assert host.post("/v1/role", Role("prefill", 0)) == (200, b'{"role":"prefill","epoch":1}')
    assert host.post("/v1/role", Role("decode", 0)) == (409, b'{"role":"prefill","epoch":1}')
    assert host.stats()["role"] == {"role": "prefill", "epoch": 1}


def test_events_of_the_pool_feed_an_index(host: Host) -> None:
    keep(host, PROMPT)
    index = PrefixIndex()
    index.join(NodeInfo("pool", ClusterId("pd"), BLOCK, rules_for(SPEC)))  # type: ignore[arg-type]
    first = page(host, "since=0")
    assert first.snapshot is None and [e.seq for e in first.events] == list(range(first.next_seq))
    for event in first.events:
        index.apply(event)
    hashes = {BLOCK: names(PROMPT)}
    assert index.match(hashes)["pool"].tokens == 40  # type: ignore[index]
    # Replay from the middle; nothing after the end; a snapshot for a reader ahead, or on request.
    assert page(host, "since=1").events == first.events[1:]
    assert page(host, f"since={first.next_seq}&wait_s=0.01").events == ()
    assert page(host, f"since={first.next_seq + 5}").snapshot is not None
    asked = page(host, "since=-1")
    assert asked.snapshot is not None and asked.next_seq == first.next_seq
    fresh = PrefixIndex()
    fresh.join(NodeInfo("pool", ClusterId("pd"), BLOCK, rules_for(SPEC)))  # type: ignore[arg-type]
    fresh.snapshot("pool", asked.snapshot, asked.next_seq)  # type: ignore[arg-type]
    assert fresh.match(hashes)["pool"].tokens == 40  # type: ignore[index]


def test_waiting_for_events_ends_with_the_next_one(host: Host) -> None:
    found: Queue[EventPage] = Queue()
    waiting = Thread(target=lambda: found.put(page(host, f"since=0&wait_s={PATIENCE_S}")))
    waiting.start()
    keep(host, PROMPT)
    assert found.get(timeout=PATIENCE_S).events
    waiting.join()


def test_events_of_an_engine_are_published_as_hashes(host: Host) -> None:
    tokens = list(range(1000, 1000 + 2 * BLOCK))
    stored = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": "GPU",
        "group_idx": 0,
    }
    with host.engine("vllm-0") as engine:
        engine.publish(msgspec.msgpack.encode([0.0, [stored], 0]))
        found = page(host, "node=vllm-0")
        assert found.events[0].hashes == tuple(block_hashes(tokens, BLOCK))
        assert found.events[0].group == "full0"
        assert host.stats()["next_seq"]["vllm-0"] == 1
        snapshot = page(host, "node=vllm-0&since=-1").snapshot
        assert snapshot is not None and set(snapshot["full0"]) == set(found.events[0].hashes)
    # The engine has exited, and its cache with it.
    gone = page(host, f"node=vllm-0&since=1&wait_s={PATIENCE_S}").events
    assert [event.action for event in gone] == ["removed"]


def test_an_engine_with_blocks_of_another_size_is_published_in_the_blocks_of_the_pool(
    host: Host,
) -> None:
    """vLLM's blocks have 6 tokens, those of the pool 4. A state is announced where both end."""
    size = BLOCK * 3 // 2
    tokens = list(range(1000, 1000 + 4 * size))
    stored = {
        "type": "BlockStored",
        "block_hashes": [11, 12, 13, 14],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": size,
    }
    groups = {0: "full0", 1: "linear0"}
    payload = msgspec.msgpack.encode([0.0, [stored | {"group_idx": group} for group in groups], 0])
    held = block_hashes(tokens, BLOCK)
    with host.engine("vllm-0") as engine:
        engine.publish(payload, groups, BLOCK)
        found = page(host, "node=vllm-0")
        assert [(event.group, event.hashes) for event in found.events] == [
            ("full0", tuple(held)),
            ("linear0", (held[2], held[5])),
        ]
        with pytest.raises(InputError, match="block_tokens"):
            engine.publish(payload, groups, size)


def test_metrics_are_prometheus(host: Host) -> None:
    keep(host, PROMPT)
    status, body = host.get("/metrics")
    lines = body.decode().splitlines()
    assert status == 200
    memory = 'prfaas_kvd_pool_memory_bytes{form="canonical",state="'
    found = [line for line in lines if line.startswith(memory)]
    assert [line.split('"')[3] for line in found] == ["held", "idle", "free"]
    assert float(found[1].split()[-1]) > 0, "the prefix is kept and is held by no request"
    assert 'prfaas_kvd_transfers{direction="incoming",stage="granted"} 0.0' in lines
    assert 'prfaas_kvd_pool_lookups_total{form="canonical"} 1.0' in lines


def test_a_kvd_sends_heartbeats_to_its_gateways(tmp_path: Path) -> None:
    heard: Queue[tuple[str, dict[str, Any]]] = Queue()

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Authorization"] == "Bearer sk-gateway":
                heard.put((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            unreachable, gateway = "http://127.0.0.1:1", f"http://127.0.0.1:{server.server_port}/"
            key = SharedKey(["sk-gateway"])
            gateways = (unreachable, gateway)
            with kvd(tmp_path, cluster="far", gateways=gateways, member_key=key) as host:
                with host.engine("node-a", url="http://node-a:8000"):
                    path, body = heard.get(timeout=PATIENCE_S)
                    assert (path, body["kvd_url"]) == ("/prfaas/v1/register", host.url)
                    assert body["cluster"] == "far"
                    while not body["report"]["engines"]:
                        _, body = heard.get(timeout=PATIENCE_S)
                    (engine,) = body["report"]["engines"]
                    assert engine["url"] == "http://node-a:8000"
        finally:
            server.shutdown()
            thread.join()


def test_a_wildcard_is_not_advertised(tmp_path: Path) -> None:
    everywhere = Address("0.0.0.0", 0)
    open_to_all: dict[str, Any] = {"listen": everywhere, "insecure": True}
    with kvd(tmp_path, http=everywhere, advertise="localhost", **open_to_all) as host:
        assert host.data.startswith("localhost:") and host.url.startswith("http://localhost:")
        assert host.stats()["data_address"] == host.data
    with kvd(tmp_path, via="relay:7400", **open_to_all) as host:
        assert host.data.startswith(socket.gethostname())
        with host.engine():
            assert host.grant(PROMPT).data_address == "relay:7400"


def test_a_prompt_of_a_million_tokens_fits_into_a_body_and_many_times_as_many_do_not(
    host: Host,
) -> None:
    """Each name becomes an object of a kvd's heap, before anything can be decided about it."""
    for tokens, status in ((1_000_000, 200), (4_000_000, 413)):
        asked = MatchPrefix((b"h" * 32,) * (tokens // 16), COMPAT)
        assert host.post("/v1/match", asked)[0] == status
