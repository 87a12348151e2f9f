"""Two vLLM servers, two kvds, TCP between them: the same tokens as one plain vLLM, or none."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.cache.hashing import block_hashes
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf.load import load_model
from prfaas.kvd.client import KvdClient
from prfaas.kvd.messages import spec_of
from prfaas.kvspec import FullAttention, LinearState, Segment, SlidingWindow
from prfaas.types import BlockHash, TransferId
from tests.vllm import kvds
from tests.vllm.kvds import HttpRefusal, Kvd
from tests.vllm.pairs import Pair, pair
from tests.vllm.reference import Generated, reference
from tests.vllm.servers import VllmServer
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # servers start and stop within it

MAX_TOKENS = 16
CONCURRENT = 8
BLOCK = 128
# Around blocks (and windows: both are 128 tokens), around chunks of 256, several chunks long.
LENGTHS = [2, 3, 60, 127, 128, 129, 130, 200, 255, 256, 257, 258, 300, 384, 385, 400, 511, 512, 513]
LENGTHS += [514, 640, 700, 768, 769, 896, 1000, 1023, 1024, 1025, 1300]
TURNS = (700, 1100)  # a conversation: the second prompt continues the first
BRANCH = (1100, 700)  # a longer prompt first, then its beginning with another end
EDGES = [513, 641, 900, 901, 902, 2600]  # for controls (one token behind a boundary) and faults


def _prompts() -> dict[str, list[list[int]]]:
    rng = random.Random(20)

    def draw(tokens: int) -> list[int]:
        return [rng.randrange(256) for _ in range(tokens)]

    conversation = draw(TURNS[1])
    branch = draw(BRANCH[0])
    return {
        "all": [draw(length) for length in LENGTHS],
        "turns": [conversation[: TURNS[0]], conversation],
        "branch": [branch, [*branch[: BRANCH[1] - 40], *draw(40)]],
        "edges": [draw(length) for length in EDGES],
    }


PROMPTS = _prompts()
UNCACHED = ["--no-enable-prefix-caching", "--max-num-batched-tokens", "256"]
CACHED = ["--enable-prefix-caching", "--max-num-batched-tokens", "256"]
# Without Triton vLLM's Mamba kernels cannot cut a chunk at a block boundary: one block at a time.
ALIGNED = ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
ALIGNED += ["--max-num-batched-tokens", str(BLOCK)]
CASES = [
    ("falcon-h1", UNCACHED),
    ("falcon-h1", ALIGNED),
    ("gemma3", UNCACHED),
    ("gemma3", CACHED),
]


@dataclass(frozen=True, slots=True)
class Model:
    arch: str
    directory: Path
    expected: dict[str, list[Generated]]  # by name, as PROMPTS


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Made and answered by a plain vLLM before any server runs."""
    made: dict[str, Model] = {}
    flat = [prompt for prompts in PROMPTS.values() for prompt in prompts]
    for arch in dict(CASES):
        directory = tmp_path_factory.mktemp("models") / arch
        make_checkpoint(directory, arch)
        answers = iter(reference(directory, flat, MAX_TOKENS))
        expected = {name: [next(answers) for _ in prompts] for name, prompts in PROMPTS.items()}
        made[arch] = Model(arch, directory, expected)
    return made


@dataclass(frozen=True, slots=True)
class Case:
    model: Model
    pair: Pair
    cached: bool  # vLLM's own prefix cache


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1][0]}")
def case(
    request: pytest.FixtureRequest,
    models: dict[str, Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    arch, flags = request.param
    with pair(tmp_path_factory.mktemp("run"), models[arch].directory, flags) as both:
        yield Case(models[arch], both, flags is not UNCACHED)


def boundary(tokens: int) -> int:
    return (tokens - 1) // BLOCK * BLOCK


def test_thirty_prompts_eight_at_a_time(case: Case) -> None:
    """Every other one is handed off at N - 1, the rest at the last boundary."""

    def answer(index: int) -> Generated:
        prompt = PROMPTS["all"][index]
        aligned = boundary(len(prompt)) if index % 2 else 0
        return case.pair.generate(prompt, aligned or len(prompt) - 1, MAX_TOKENS)

    with ThreadPoolExecutor(CONCURRENT) as threads:
        answers = list(threads.map(answer, range(len(LENGTHS))))
    expected = case.model.expected["all"]
    wrong = [
        (length, answer, plain)
        for length, answer, plain in zip(LENGTHS, answers, expected, strict=True)
        if not answer.same(plain)
    ]
    assert not wrong
    several = {tuple(answer.tokens) for answer in answers}
    assert len(several) > len(LENGTHS) // 2, "the model does not discriminate"
    wait_until(case.pair.nothing_held)


def test_a_second_turn_sends_only_what_is_new(case: Case) -> None:
    first, second = PROMPTS["turns"]
    expected = case.model.expected["turns"]
    whole = case.pair.hand_off(first, boundary(TURNS[0]))
    answer = case.pair.resume(first, MAX_TOKENS, whole["transfer_id"])
    computed = _computed_tokens(case.pair.prefill)
    more = case.pair.hand_off(second, boundary(TURNS[1]))
    assert case.pair.sent_bytes(whole) == _bytes(case.pair.source, boundary(TURNS[0]), 0)
    assert case.pair.sent_bytes(more) == _bytes(
        case.pair.source, boundary(TURNS[1]), boundary(TURNS[0])
    )
    resumed = case.pair.resume(second, MAX_TOKENS, more["transfer_id"])
    assert answer.generated.same(expected[0]) and resumed.generated.same(expected[1])
    # The prefill side resumed too: from its own cache, its kvd's pool, or both.
    new_tokens = boundary(TURNS[1]) - boundary(TURNS[0])
    assert _computed_tokens(case.pair.prefill) - computed == new_tokens


def test_a_branch_of_a_longer_prompt_is_not_computed_again(case: Case) -> None:
    """The decode server holds attention blocks beyond the branch, but no state where it ends."""
    longer, branch = PROMPTS["branch"]
    answers = [case.pair.generate(longer, boundary(len(longer)), MAX_TOKENS)]
    cut = boundary(BRANCH[1] - 40)
    computed = _computed_tokens(case.pair.decode)
    answers.append(case.pair.generate(branch, cut, MAX_TOKENS))
    assert all(a.same(e) for a, e in zip(answers, case.model.expected["branch"], strict=True))
    assert _computed_tokens(case.pair.decode) - computed <= len(branch) - cut


def test_cache_events_reach_the_kvd_as_hashes(case: Case) -> None:
    prompt = PROMPTS["edges"][4]
    (engine,) = case.pair.source.report().engines
    case.pair.prefill.complete(prompt, 1)
    names = set(block_hashes(prompt, BLOCK))
    if case.cached:
        wait_until(lambda: names <= case.pair.source.stored(engine.engine_id))
    else:
        assert not case.pair.source.stored(engine.engine_id)


@pytest.mark.parametrize("what", ["growing", "closing"])
def test_zeroed_state_changes_the_answer(case: Case, what: str) -> None:
    """The control: answers depend on full attention as well as on states and windows."""
    number = ["growing", "closing"].index(what)
    prompt, expected = PROMPTS["edges"][number], case.model.expected["edges"][number]
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    _zero(case.pair.target, prompt, boundary(len(prompt)), what)
    answer = case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).generated
    assert not answer.same(expected)
    # Zeroed states and windows change the tokens themselves.
    assert what == "growing" or answer.tokens != expected.tokens


def test_an_engine_of_another_kind_is_refused_with_the_reason(case: Case) -> None:
    before = case.pair.target.report().incoming
    other = load_model(case.model.directory, device="cpu").compat(BLOCK)
    with pytest.raises(HttpRefusal) as refusal:
        case.pair.target.open(PROMPTS["edges"][0], 384, other)
    assert refusal.value.status == 409
    assert "layout: " in str(refusal.value) and "canonical" in str(refusal.value)
    assert case.pair.target.report().incoming == before


def test_a_lost_transfer_is_an_error_not_an_answer(case: Case) -> None:
    prompt, expected = PROMPTS["edges"][2], case.model.expected["edges"][2]
    assert case.pair.resume(prompt, MAX_TOKENS, "no-such-transfer").status == 500
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    case.pair.target.abort(TransferId(params["transfer_id"]))
    assert case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).status == 500
    assert case.pair.generate(prompt, len(prompt) - 1, MAX_TOKENS).same(expected)
    wait_until(case.pair.nothing_held)


def test_a_prefill_without_its_grant_is_told_so(case: Case) -> None:
    prompt = PROMPTS["edges"][3]
    grant = case.pair.grant(prompt, len(prompt) - 1)
    case.pair.target.abort(grant.transfer_id)
    case.pair.run_prefill(prompt, len(prompt) - 1, grant)
    assert case.pair.target.status(grant.transfer_id).state == "failed"
    malformed = case.pair.prefill.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    assert malformed.transfer["error"]["code"] == "invalid_request"
    wait_until(case.pair.nothing_held)


def test_a_prompt_beyond_the_arena_is_refused_before_it_is_computed(case: Case) -> None:
    """Grants of a far larger kvd: the sender's own has no room for what it promised."""
    prompt = PROMPTS["edges"][5]
    grant = case.pair.grant(prompt, len(prompt) - 1)
    small = _restarted(case.pair.source, memory_bytes=2 << 20)
    case.pair.source = small
    try:
        wait_until(lambda: _reregistered(case, small))
        answer = case.pair.run_prefill(prompt, len(prompt) - 1, grant)
        assert answer.transfer["error"]["code"] == "overloaded", answer.transfer
        assert answer.body["usage"]["prompt_tokens"] >= 1
        case.pair.target.abort(grant.transfer_id)
    finally:
        case.pair.source = _restarted(small)
        wait_until(lambda: _reregistered(case, case.pair.source))


def test_a_sender_killed_in_the_middle_and_started_again(case: Case) -> None:
    prompt, expected = PROMPTS["edges"][5], case.model.expected["edges"][5]
    grant = case.pair.grant(prompt, len(prompt) - 1)
    with ThreadPoolExecutor(1) as threads:
        prefill = threads.submit(case.pair.run_prefill, prompt, len(prompt) - 1, grant)
        wait_until(lambda: case.pair.target.report().arrivals.received_bytes > 0)
        case.pair.source = _restarted(case.pair.source)
        answer = prefill.result()
    assert answer.transfer["error"]["code"] in ("transfer_lost", "kvd_unavailable")
    assert case.pair.target.status(grant.transfer_id, wait_s=60).state == "failed"
    assert case.pair.resume(prompt, MAX_TOKENS, grant.transfer_id).status == 500
    wait_until(lambda: _reregistered(case, case.pair.source))
    assert case.pair.generate(prompt, len(prompt) - 1, MAX_TOKENS).same(expected)
    wait_until(case.pair.nothing_held)


def test_a_receiver_started_again_has_lost_what_it_held(case: Case) -> None:
    prompt, expected = PROMPTS["edges"][4], case.model.expected["edges"][4]
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    case.pair.target = _restarted(case.pair.target)
    assert case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).status == 500
    assert case.pair.generate(prompt, boundary(len(prompt)), MAX_TOKENS).same(expected)
    wait_until(case.pair.nothing_held)


def test_a_killed_engine_leaves_nothing_held(case: Case) -> None:
    """Last: this pair does not serve any more."""
    prompt = PROMPTS["edges"][5]
    grant = case.pair.grant(prompt, len(prompt) - 1)
    with ThreadPoolExecutor(1) as threads:
        prefill = threads.submit(_until_hung_up, case, prompt, grant)
        wait_until(lambda: case.pair.source.report().held_leases > 0)
        case.pair.prefill.kill(signal.SIGKILL)
        prefill.result()
    wait_until(case.pair.source.idle)
    assert case.pair.target.status(grant.transfer_id, wait_s=60).state == "failed"
    wait_until(case.pair.target.idle)


# What the tests above look at ---------------------------------------------------------------------


def _bytes(kvd: Kvd, tokens: int, skip_tokens: int) -> int:
    """Of a hand-off at a block boundary: whole blocks."""
    pool = kvd.report().pool
    assert pool is not None
    total = 0
    for group in spec_of(pool.groups).groups:
        match group:
            case LinearState():
                each = group.state_bytes
            case SlidingWindow():
                first = group.first_token(tokens) // BLOCK * BLOCK
                each = (tokens - first) * group.bytes_per_token
            case FullAttention():
                each = (tokens - skip_tokens) * group.bytes_per_token
        total += len(group.layers) * each
    return total


def _zero(kvd: Kvd, prompt: list[int], tokens: int, what: str) -> None:
    """Overwrites the pages of a prefix through another mapping of the arena."""
    pool = kvd.report().pool
    assert pool is not None
    spec = spec_of(pool.groups)
    hashes: list[BlockHash] = block_hashes(prompt[:tokens], BLOCK)
    with KvdClient(
        kvd.socket,
        engine_id="control",
        spec=spec,
        block_tokens=BLOCK,
        compat=pool.compat,
        whole_blocks=True,
    ) as client:
        lease = client.pin(hashes)
        assert lease.tokens == tokens
        for group in spec.groups:
            if isinstance(group, FullAttention) is (what == "growing"):
                first = 0
                if isinstance(group, SlidingWindow):
                    first = group.first_token(tokens) // BLOCK * BLOCK
                for layer in group.layers:
                    for view in lease.views(Segment(group.name, layer, first, tokens)):
                        view[:] = bytes(len(view))
        lease.release()


def _computed_tokens(server: VllmServer) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def _restarted(kvd: Kvd, memory_bytes: int = kvds.MEMORY_BYTES) -> Kvd:
    kvds.stop(kvd)
    return kvds.start(kvd.socket, memory_bytes)


def _reregistered(case: Case, kvd: Kvd) -> bool:
    """An engine comes back with its next hand-off; a refused one is enough."""
    if kvd.report().pool is None:
        case.pair.prefill.complete([1, 2, 3], 1, kv_transfer_params=_nowhere())
    return kvd.report().pool is not None


def _nowhere() -> dict[str, object]:
    grant = {
        "type": "grant",
        "transfer_id": "nowhere",
        "token": "",
        "data_address": "127.0.0.1:1",
        "skip_tokens": {},
        "max_bytes": 0,
        "deadline_s": 1.0,
    }
    return {"do_remote_decode": True, "grant": grant, "handoff_tokens": 2}


def _until_hung_up(case: Case, prompt: list[int], grant: object) -> None:
    with pytest.raises(OSError):
        case.pair.run_prefill(prompt, len(prompt) - 1, grant)
