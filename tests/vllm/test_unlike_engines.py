"""Engines that are not alike hand over to each other in the canonical form, token for token.

A vLLM server and a `prfaas node` with the same checkpoint, both ways. `prfaas bench pairs` has the
other pairs: tensor and pipeline parallelism, block sizes, models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.kvd_api import PoolReport
from prfaas.testing.vllm_server import Generated, VllmServer, await_health
from prfaas.types import Grant
from tests.node.hosts import Host
from tests.vllm import kvds
from tests.vllm.cases import (
    ALIGNED,
    CACHED,
    LENGTHS,
    MAX_TOKENS,
    PROMPTS,
    TURNS,
    Model,
)
from tests.vllm.pairs import PATIENCE_S, decode_params, prefill_params
from tests.vllm.servers import connected_server
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # servers start and stop within it
WIRE_BLOCK = 64
# Around the wire's blocks and vLLM's, around windows, several chunks long.
CHOSEN = [2, 3, 60, 128, 129, 200, 257, 385, 513, 700, 1025, 1300]


@dataclass(frozen=True, slots=True)
class Unlike:
    model: Model
    node: Host
    server: VllmServer
    kvd: kvds.Kvd  # the server's

    def to_vllm(self, prompt: list[int], tokens: int) -> tuple[Generated, Grant]:
        """The node prefills `tokens` tokens, vLLM decodes."""
        grant = self.kvd.open(prompt, tokens, self.kvd.compat())
        assert isinstance(grant, Grant), grant
        self.node.complete(
            prompt[:tokens],
            max_tokens=1,
            kv_transfer_params=prefill_params(tokens, grant),
        )
        assert self.kvd.status(grant.transfer_id, wait_s=PATIENCE_S).state == "committed"
        answer = self.server.complete(
            prompt, MAX_TOKENS, kv_transfer_params=decode_params(grant.transfer_id)
        )
        return answer.generated, grant

    def to_node(self, prompt: list[int], tokens: int) -> tuple[list[int], Grant]:
        """vLLM prefills `tokens` tokens, the node decodes."""
        receiver = kvds.Kvd(Path(), self.node.kvd.popen, self.node.kvd_url)
        grant = receiver.open(prompt, tokens, self.kvd.compat())
        assert isinstance(grant, Grant), grant
        params = self.server.complete(
            prompt, 1, kv_transfer_params=prefill_params(tokens, grant)
        ).transfer
        assert params["do_remote_prefill"], params
        assert receiver.status(grant.transfer_id, wait_s=PATIENCE_S).state == "committed"
        answer = self.node.complete(
            prompt,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            kv_transfer_params=decode_params(grant.transfer_id),
        )
        return answer["choices"][0]["token_ids"], grant

    def nothing_held(self) -> bool:
        return self.server.idle() and self.kvd.idle()


PAIRS = [("falcon-h1", ALIGNED), ("gemma3", CACHED)]


@pytest.fixture(scope="module", params=PAIRS, ids=["falcon-h1-aligned", "gemma3-cached"])
def unlike(
    request: pytest.FixtureRequest,
    models: Callable[[str], Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Unlike]:
    arch, flags = request.param
    model = models(arch)
    folder = tmp_path_factory.mktemp("unlike")
    kvd = kvds.start(folder / "v.kvd")
    server = connected_server(
        folder,
        "v",
        model.directory,
        kvd.socket,
        core=0,
        flags=flags,
        settings={"form": "canonical"},
    )
    node = Host(folder / "node", ("--model", str(model.directory)))
    try:
        node.wait_until_ready()
        await_health(server)
        yield Unlike(model, node, server, kvd)
    finally:
        node.close()
        server.stop()
        kvds.stop(kvd)


def handoffs(tokens: int) -> list[int]:
    """One token before the end, and at the last boundary of the wire's blocks."""
    boundary = (tokens - 1) // WIRE_BLOCK * WIRE_BLOCK
    return sorted({tokens - 1, boundary} - {0})


def test_both_engines_say_that_they_are_compatible(unlike: Unlike) -> None:
    theirs = msgspec.convert(unlike.node.stats()["pool"], PoolReport)
    ours = unlike.kvd.report().pool
    assert ours is not None
    assert (ours.compat, ours.groups) == (theirs.compat, theirs.groups)


def test_a_node_prefills_for_vllm(unlike: Unlike) -> None:
    for length in CHOSEN:
        at = LENGTHS.index(length)
        prompt, expected = PROMPTS["all"][at], unlike.model.expected["all"][at]
        for tokens in handoffs(length):
            found, _ = unlike.to_vllm(prompt, tokens)
            assert found.same(expected), f"{tokens} of {length} tokens"
    wait_until(unlike.nothing_held)
    unlike.node.wait_until_idle()


def test_vllm_prefills_for_a_node(unlike: Unlike) -> None:
    for length in CHOSEN:
        at = LENGTHS.index(length)
        prompt, expected = PROMPTS["all"][at], unlike.model.expected["all"][at]
        for tokens in handoffs(length):
            found, _ = unlike.to_node(prompt, tokens)
            assert found == expected.tokens, f"{tokens} of {length} tokens"
    wait_until(unlike.nothing_held)
    unlike.node.wait_until_idle()


def test_bytes_on_the_way_are_those_of_the_canonical_form(unlike: Unlike) -> None:
    prompt = [7, *PROMPTS["all"][LENGTHS.index(700)][1:]]  # neither engine has a prefix of it
    _, grant = unlike.to_vllm(prompt, 699)
    assert not any(grant.skip_tokens.values())
    sender = kvds.Kvd(Path(), unlike.node.kvd.popen, unlike.node.kvd_url)
    assert sender.status(grant.transfer_id).nbytes == unlike.node.spec().kv_bytes(699)
    prompt = [8, *prompt[1:]]
    _, grant = unlike.to_node(prompt, 699)
    assert not any(grant.skip_tokens.values())
    assert unlike.kvd.status(grant.transfer_id).nbytes == unlike.node.spec().kv_bytes(699)


def test_a_second_turn_resumes_from_what_crossed(unlike: Unlike) -> None:
    first, second = PROMPTS["turns"]
    expected = unlike.model.expected["turns"]
    boundary = TURNS[0] // WIRE_BLOCK * WIRE_BLOCK
    found, _ = unlike.to_vllm(first, boundary)
    assert found.same(expected[0])
    found, grant = unlike.to_vllm(second, TURNS[1] - 1)
    assert found.same(expected[1])
    assert min(grant.skip_tokens.values()) == boundary, "the receiver has the first turn"
    # And back: vLLM's kvd has the whole prefix, the node's kvd a part of it.
    tokens, _ = unlike.to_node(second, TURNS[1] - 1)
    assert tokens == expected[1].tokens
    wait_until(unlike.nothing_held)
