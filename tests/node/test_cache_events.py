"""Events of a node's kvd feed a gateway's index: what it predicts to be cached is what the node
finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import PromptHashes
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.manager import GlobalKVManager
from prfaas.contracts.kvd_api import EventPage
from prfaas.types import ClusterId, NodeId
from tests.node.hosts import Gateway, Host, cached_of, call
from tests.waiting import wait_until

BLOCK = 64
CONVERSATIONS, TURNS = 8, 4


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
    manager.join(NodeInfo(hashes.node, ClusterId("pd"), BLOCK, rules_for(spec)))
    salt = f"handed off: {handed_off}"

    def prediction(prompt: list[int]) -> int:
        hashes.read()
        nodes = manager.match(PromptHashes(prompt[:-1], salt=salt)).nodes
        match = nodes.get(hashes.node, NodeMatch(0, 0))
        # A hand-off may skip every attention block there is; a plain request resumes where there is
        # a state as well.
        return match.attention_tokens if handed_off else match.tokens

    asked, found, right = 0, 0, 0
    # One by one, turn by turn: every conversation is interrupted by all the others.
    for prompts in zip(*(turns(seed) for seed in range(CONVERSATIONS)), strict=True):
        for prompt in prompts:
            predicted = prediction(prompt)
            cached = ask(emulated, prompt, salt, handed_off)
            asked, found = asked + 1, found + cached
            right += predicted == cached
            truth = host_match(host, prompt, salt)[handed_off]
            wait_until(lambda p=prompt, t=truth: prediction(p) == t)
    manager.check()
    assert asked == CONVERSATIONS * TURNS and found > 0
    assert right >= 0.95 * asked


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
