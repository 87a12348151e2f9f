"""Engines that are not alike hand over to each other in the canonical form, token for token.

A vLLM server and a `prfaas node` with the same checkpoint, both ways. The server is one of the pair
that other files use. A salt keeps the prefixes of their requests apart from those of this file.
`bench/pairs.py` has the other pairs: tensor and pipeline parallelism, block sizes, models.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.kvd_api import PoolReport
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.kvd.engine_socket.messages import SegmentName
from prfaas.kvspec import FullAttention
from prfaas.types import Grant
from prfaas_lab.testing.vllm_modelless import ModellessEngine, Recorded
from prfaas_lab.testing.vllm_server import Generated, VllmResponse, VllmServer
from tests.node.hosts import Host, running_hosts
from tests.vllm import kvds
from tests.vllm.cases import LENGTHS, MAX_TOKENS, PROMPTS, TURNS, WITH_CACHE, Case, Model, case_id
from tests.vllm.faults import Damage, relayed
from tests.vllm.pairs import PATIENCE_S, decode_params, prefill_params
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.parametrize("case", WITH_CACHE, indirect=True, ids=case_id),
]
WIRE_BLOCK = 64
# Around the wire's blocks and vLLM's, around windows, several chunks long.
CHOSEN = [2, 3, 60, 128, 129, 200, 257, 385, 513, 700, 1025, 1300]


@dataclass(frozen=True, slots=True)
class Unlike:
    model: Model
    node: Host
    server: VllmServer
    kvd: kvds.Kvd  # the server's
    salt: str

    def to_vllm(self, prompt: list[int], tokens: int) -> tuple[Generated, Grant]:
        """The node prefills `tokens` tokens, vLLM decodes."""
        grant = self.kvd.open(prompt, tokens, self.kvd.compat("canonical"), salt=self.salt)
        assert isinstance(grant, Grant), grant
        self.node.complete(
            prompt[:tokens],
            max_tokens=1,
            cache_salt=self.salt,
            kv_transfer_params=prefill_params(tokens, grant),
        )
        assert self.kvd.status(grant.transfer_id, wait_s=PATIENCE_S).state == "committed"
        answer = self.server.complete(
            prompt,
            MAX_TOKENS,
            cache_salt=self.salt,
            kv_transfer_params=decode_params(grant.transfer_id, "canonical"),
        )
        return answer.generated, grant

    def to_node(self, prompt: list[int], tokens: int) -> tuple[list[int], Grant]:
        """vLLM prefills `tokens` tokens, the node decodes."""
        receiver = kvds.Kvd(Path(), self.node.kvd.popen, self.node.kvd_url)
        grant = receiver.open(prompt, tokens, self.kvd.compat("canonical"), salt=self.salt)
        assert isinstance(grant, Grant), grant
        params = self.server.complete(
            prompt, 1, cache_salt=self.salt, kv_transfer_params=prefill_params(tokens, grant)
        ).transfer
        assert params["do_remote_prefill"], params
        assert receiver.status(grant.transfer_id, wait_s=PATIENCE_S).state == "committed"
        answer = self.node.complete(
            prompt,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            cache_salt=self.salt,
            kv_transfer_params=decode_params(grant.transfer_id, "canonical"),
        )
        return answer["choices"][0]["token_ids"], grant

    def nothing_held(self) -> bool:
        return self.server.idle() and self.kvd.idle()


@pytest.fixture(scope="module")
def unlike(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unlike]:
    options = {"node": ("--model", str(case.model.directory))}
    with running_hosts(tmp_path_factory.mktemp("unlike"), options) as (node,):
        pair = case.pair
        yield Unlike(case.model, node, pair.prefill, pair.source, secrets.token_hex(8))


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


def test_a_prefix_that_was_copied_between_the_kvds_serves_the_other_engine(unlike: Unlike) -> None:
    tokens = 699
    prompt = [9, *PROMPTS["all"][LENGTHS.index(700)][1:]]
    own = unlike.node.complete(
        prompt, max_tokens=MAX_TOKENS, ignore_eos=True, cache_salt=unlike.salt
    )
    whole = prompt[: tokens // WIRE_BLOCK * WIRE_BLOCK]
    pulled = unlike.kvd.pull(unlike.node.kvd_url, whole, "canonical", unlike.salt)
    assert pulled.tokens > 0
    computed = _computed_tokens(unlike.server)
    found, _ = unlike.to_node(prompt, tokens)
    assert found == own["choices"][0]["token_ids"]
    assert _computed_tokens(unlike.server) - computed == tokens - pulled.tokens


def _computed_tokens(server: VllmServer) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


# Damaged and mislabelled states -------------------------------------------------------------------

DAMAGED_TOKENS = 385


@dataclass(frozen=True, slots=True)
class Forger:
    """Sends the state that vLLM has computed itself back to it, as another engine would."""

    unlike: Unlike
    engine: ModellessEngine
    state: Recorded  # after all tokens of the prompt but the last
    prompt: list[int]
    expected: Generated

    def grant(self, salt: str) -> Grant:
        grant = self.unlike.kvd.open(self.prompt, self.tokens, self.engine.compat, salt=salt)
        assert isinstance(grant, Grant), grant
        assert not any(grant.skip_tokens.values())
        return grant

    @property
    def tokens(self) -> int:
        return len(self.prompt) - 1

    @property
    def names(self) -> list[SegmentName]:
        return [SegmentName(s.group, s.layer, s.start, s.stop) for s in self.state]

    def write(self, grant: Grant, salt: str) -> WriteLease:
        return self.engine.write(self.prompt, self.tokens, grant, salt, self.state)

    def decode(self, grant: Grant, salt: str) -> VllmResponse:
        return self.unlike.server.complete(
            self.prompt,
            MAX_TOKENS,
            kv_transfer_params=decode_params(grant.transfer_id, "canonical"),
            cache_salt=salt,
        )

    def check_right(self, grant: Grant, salt: str) -> None:
        assert self.unlike.kvd.status(grant.transfer_id, wait_s=PATIENCE_S).state == "committed"
        assert self.decode(grant, salt).generated.same(self.expected)

    def check_lost(self, grant: Grant, salt: str, reason: str) -> None:
        """The transfer has failed before its commit, and the request fails: no token at all."""
        status = self.unlike.kvd.status(grant.transfer_id, wait_s=PATIENCE_S)
        assert status.state == "failed" and reason in status.reason, status
        answer = self.decode(grant, salt)
        assert answer.status == 500 and "choices" not in answer.body, answer


@pytest.fixture(scope="module")
def forger(unlike: Unlike, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forger]:
    at = LENGTHS.index(DAMAGED_TOKENS)
    prompt, expected = PROMPTS["all"][at], unlike.model.expected["all"][at]
    pool = unlike.kvd.report().pool
    assert pool is not None
    with kvds.kvd(tmp_path_factory.mktemp("forger") / "f.kvd") as own:
        engine = ModellessEngine(own.socket, own.url, pool)
        try:
            state = engine.record(unlike.server, prompt, len(prompt) - 1)
            yield Forger(unlike, engine, state, prompt, expected)
        finally:
            engine.close()
    wait_until(unlike.nothing_held)


def test_what_a_third_engine_has_recorded_is_continued(forger: Forger) -> None:
    """The states of the tests below are right as long as none is damaged."""
    salt = secrets.token_hex(8)
    grant = forger.grant(salt)
    lease = forger.write(grant, salt)
    forger.engine.report_ready(lease, forger.names)
    lease.commit()
    forger.check_right(grant, salt)


def test_damaged_and_cut_frames_are_sent_again(forger: Forger) -> None:
    """Flipped bits are found by the checksums, and a connection that was cut in the middle of a
    frame is resumed."""
    damage = Damage(at_most=3)
    cut: list[int] = []

    def meddle(connection: int, before: int, data: bytes) -> bytes | None:
        if connection == 0 and before > 1 << 15 and not cut:
            cut.append(len(data))
            return None
        return damage(connection, before, data)

    salt = secrets.token_hex(8)
    grant = forger.grant(salt)
    with relayed(grant, meddle) as through:
        lease = forger.write(through, salt)
        forger.engine.report_ready(lease, forger.names)
        lease.commit()
        forger.check_right(grant, salt)
    assert cut or damage.done


@pytest.mark.grid  # the sender tries until the grant has ended
def test_frames_that_stay_damaged_never_commit(forger: Forger) -> None:
    salt = secrets.token_hex(8)
    grant = forger.grant(salt)
    with relayed(grant, Damage(at_most=None)) as through:
        lease = forger.write(through, salt)
        forger.engine.report_ready(lease, forger.names)
        lease.commit()
        forger.check_lost(grant, salt, "")


def mislabelled(forger: Forger) -> dict[str, list[SegmentName]]:
    """All names of the state, with one that is wrong, by what is wrong."""
    groups = forger.engine.spec.groups
    full = next(group for group in groups if isinstance(group, FullAttention))
    other = next(group for group in groups if group is not full)
    layer = full.layers[0]
    right = SegmentName(full.name, layer, 0, forger.tokens)
    rest = [name for name in forger.names if name != right]
    assert len(rest) == len(forger.names) - 1
    wrong = {
        "half of the heads": (full.name, layer, 0, forger.tokens, 0, full.heads // 2),
        "heads beyond the group": (full.name, layer, 0, forger.tokens, full.heads, 1),
        "an unknown layer": (full.name, 10_000, 0, forger.tokens),
        "another group": (other.name, other.layers[0], 0, forger.tokens),
        "too few tokens": (full.name, layer, 0, forger.tokens - 1),
        "later tokens": (full.name, layer, 1, forger.tokens),
    }
    if len(full.layers) > 1:
        wrong["another layer"] = (full.name, full.layers[-1], 0, forger.tokens)
    return {"missing": rest} | {how: [*rest, SegmentName(*name)] for how, name in wrong.items()}


def test_mislabelled_segments_never_commit(forger: Forger) -> None:
    """The kvd that sends finds at the commit that a head, layer, role or token was not written, and
    the receiver never gives the state to its engine."""
    for how, names in mislabelled(forger).items():
        salt = secrets.token_hex(8)
        grant = forger.grant(salt)
        lease = forger.write(grant, salt)
        forger.engine.report_ready(lease, names)
        with pytest.raises(InputError, match="is not ready"):
            lease.commit()
        forger.check_lost(grant, salt, "committed without")
        assert forger.unlike.server.healthy(), how
    wait_until(forger.unlike.nothing_held)


@pytest.mark.parametrize("field", ["kv_dtype", "state_dtype", "layout", "block_tokens", "model"])
def test_another_format_is_refused_at_the_grant(forger: Forger, field: str) -> None:
    """Elements of another type would be read as values of another scale."""
    right = getattr(forger.engine.compat, field)
    wrong = 2 * right if isinstance(right, int) else "float8_e4m3fn"
    other = msgspec.structs.replace(forger.engine.compat, **{field: wrong})
    with pytest.raises(kvds.HttpRefusal) as refusal:
        forger.unlike.kvd.open(forger.prompt, forger.tokens, other)
    assert refusal.value.status == 409 and field in str(refusal.value.body)
