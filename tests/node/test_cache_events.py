"""Events of a node feed a gateway's index: what it predicts to be cached is what the node finds.

Twice the same events: hashes from the kvd, and vLLM's format over ZMQ, read as a gateway's kvd
reads vLLM's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import EngineHashes, PromptHashes, hash_events
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.manager import GlobalKVManager
from prfaas.contracts.kvd_api import EventPage
from prfaas.kvspec import KVSpec
from prfaas.types import ClusterId, NodeId
from tests.node.hosts import Gateway, Host, cached_of, call
from tests.waiting import wait_until

BLOCK = 64
CONVERSATIONS, TURNS = 8, 4
ZMQ_NODE = NodeId("by vLLM's events")


class HashReader:
    """A gateway that reads the kvd's events."""

    def __init__(self, host: Host, manager: GlobalKVManager) -> None:
        self.node = NodeId(host.stats()["node"])
        self._host = host
        self._manager = manager
        self._next = -1

    def read(self) -> None:
        url = f"{self._host.kvd_url}/v1/events?since={self._next}"
        status, raw = call("GET", url)
        assert status == 200, raw
        page = msgspec.convert(raw, EventPage)
        if page.snapshot is not None:
            assert self._manager.snapshot(self.node, page.snapshot, page.next_seq)
        for event in page.events:
            assert self._manager.apply(event)
        self._next = page.next_seq


class ZmqReader:
    """A kvd that reads an engine's events, and asks for what it missed."""

    def __init__(
        self, subscriber: zmq.Socket[bytes], replay: zmq.Socket[bytes], spec: KVSpec
    ) -> None:
        names = {index: group.name for index, group in enumerate(spec.groups)}
        self.engine = EngineHashes(ZMQ_NODE, names)
        self._subscriber = subscriber
        self._replay = replay
        self._next = 0

    def read(self, manager: GlobalKVManager) -> None:
        while self._subscriber.poll(0):
            _, number, batch = self._subscriber.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq > self._next:
                self.catch_up(manager)
            if seq == self._next:
                self._take(seq, batch, manager)

    def catch_up(self, manager: GlobalKVManager) -> int:
        """How many batches were replayed."""
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        replayed = 0
        while True:
            _, number, batch = self._replay.recv_multipart()
            if not batch:
                return replayed
            self._take(int.from_bytes(number, "big"), batch, manager)
            replayed += 1

    def _take(self, seq: int, batch: bytes, manager: GlobalKVManager) -> None:
        for event in hash_events(self.engine, batch):
            assert manager.apply(event)
        self._next = seq + 1


@contextmanager
def zmq_reader(host: Host, spec: KVSpec) -> Iterator[ZmqReader]:
    (card,) = call("GET", f"{host.url}/v1/models")[1]["data"]
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        context.socket(zmq.DEALER) as replay,
    ):
        subscriber.linger = replay.linger = 0
        subscriber.subscribe(b"kv")
        subscriber.connect(card["prfaas"]["events"])
        replay.connect(card["prfaas"]["replay"])
        yield ZmqReader(subscriber, replay, spec)


def turns(seed: int) -> Iterator[list[int]]:
    """Prompts of one conversation; two of them begin alike."""
    chance = random.Random(seed)
    prompt = random.Random(seed // 2).choices(range(256), k=150)
    for _ in range(TURNS):
        prompt = prompt + chance.choices(range(256), k=chance.randrange(20, 150))
        yield prompt


@pytest.mark.parametrize("handed_off", [False, True], ids=["plain", "handed off"])
def test_predictions_are_what_the_node_finds(emulated: Gateway, handed_off: bool) -> None:
    host = emulated.decode_host
    spec = host.spec()
    manager = GlobalKVManager(spec)
    hashes = HashReader(host, manager)
    for node in (hashes.node, ZMQ_NODE):
        manager.join(NodeInfo(node, ClusterId("pd"), BLOCK, rules_for(spec)))
    salt = f"handed off: {handed_off}"
    right: dict[NodeId, int] = {hashes.node: 0, ZMQ_NODE: 0}
    asked, found = 0, 0
    with zmq_reader(host, spec) as by_zmq:

        def predictions(prompt: list[int]) -> dict[NodeId, int]:
            hashes.read()
            by_zmq.read(manager)
            nodes = manager.match(PromptHashes(prompt[:-1], salt=salt)).nodes
            held = {node: nodes.get(node, NodeMatch(0, 0)) for node in right}
            # A hand-off may skip every attention block there is; a plain request resumes where
            # there is a state as well.
            return {
                node: match.attention_tokens if handed_off else match.tokens
                for node, match in held.items()
            }

        # What was published before it subscribed: at least that the pool began empty.
        wait_until(lambda: by_zmq.catch_up(manager) > 0)
        # One by one, turn by turn: every conversation is interrupted by all the others.
        for prompts in zip(*(turns(seed) for seed in range(CONVERSATIONS)), strict=True):
            for prompt in prompts:
                predicted = predictions(prompt)
                cached = ask(emulated, prompt, salt, handed_off)
                asked, found = asked + 1, found + cached
                for node, tokens in predicted.items():
                    right[node] += tokens == cached
                truth = host_match(host, prompt, salt)[handed_off]
                wait_until(lambda p=prompt, t=truth: set(predictions(p).values()) == {t})
        by_zmq.engine.check()
    manager.check()
    assert asked == CONVERSATIONS * TURNS and found > 0
    for node, number in right.items():
        assert number >= 0.95 * asked, f"{node}: {number} of {asked}"


def ask(pair: Gateway, prompt: list[int], salt: str, handed_off: bool) -> int:
    """The cached tokens of the prompt, as the decode side reports them."""
    if handed_off:
        return pair.hand_off(prompt, max_tokens=1, resumable=True, salt=salt).skip_tokens
    answer: dict[str, Any] = pair.decode_host.complete(prompt, max_tokens=1, cache_salt=salt)
    return cached_of(answer)


def host_match(host: Host, prompt: list[int], salt: str) -> tuple[int, int]:
    names = PromptHashes(prompt[:-1], salt=salt).at(BLOCK)
    body = {"hashes": msgspec.to_builtins(names)}
    status, match = call("POST", f"{host.kvd_url}/v1/match", body)
    assert status == 200, match
    return match["tokens"], match["attention_tokens"]
