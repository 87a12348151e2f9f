"""Ranks of an engine that write their heads into the same pages, over real sockets and a real
transfer to another kvd."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prfaas.engine.chunks import resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.errors import InputError, TransferFailed
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import SegmentName
from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, Segment
from prfaas.types import Grant
from tests.kvd.engine_socket.ranks import SPEC, Rank, write_heads
from tests.kvd.hosts import Host, begun, kvd, names, prompt_of
from tests.waiting import PATIENCE_S, wait_until

TOKENS = 42
PROMPT = prompt_of(TOKENS)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """The prefill side's kvd and the decode side's."""
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d") as there:
        yield here, there


@pytest.fixture(scope="module")
def idle_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """For tests that leave nothing behind in either pool."""
    folder = tmp_path_factory.mktemp("idle")
    with kvd(folder, name="p") as here, kvd(folder, name="d") as there:
        yield here, there


def engine(host: Host, name: str = "engine") -> KvdClient:
    return host.engine(name, spec=SPEC)


def assert_state(lease: ReadLease, tokens: int) -> None:
    assert lease.tokens == tokens
    content = Content(SPEC, PROMPT)
    for segment in resume_segments(SPEC, tokens) if tokens else ():
        content.check(segment, lease.views(segment))


def commit_and_read(
    pair: tuple[Host, Host], grant: Grant, lease: WriteLease, prefill: KvdClient, decode: KvdClient
) -> None:
    here, there = pair
    lease.commit()
    assert there.settled(grant)["state"] == "committed"
    lease.sent.result(PATIENCE_S)
    with decode.attach(grant.transfer_id) as found:
        assert_state(found, TOKENS)
    kept = max(lease.checkpoint_tokens, default=0)
    with begun(prefill.pin(names(PROMPT))) as found:
        assert_state(found, kept)
    wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_write_their_heads_in_any_order(
    pair: tuple[Host, Host], ranks: int, stages: int
) -> None:
    """With four ranks, the two heads of the window are on two ranks each: one of them writes."""
    here, there = pair
    with engine(here, "scheduler") as prefill, engine(there) as decode, ExitStack() as stack:
        grant = there.grant(PROMPT, checkpoint_tokens=40)
        lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))

        all_ranks = [Rank(rank, ranks, at, stages) for rank in range(ranks) for at in range(stages)]
        workers = [stack.enter_context(engine(here, f"{rank}")) for rank in all_ranks]

        def work(rank: Rank, worker: KvdClient) -> None:
            rank.write(worker.join_write(lease.ticket), PROMPT, chunk_tokens=3 + 2 * rank.rank)
            worker.flush()

        with ThreadPoolExecutor(len(workers)) as threads:
            list(threads.map(work, all_ranks, workers))
        commit_and_read(pair, grant, lease, prefill, decode)


@pytest.mark.slow
def test_processes_write_their_heads_into_the_same_pages(pair: tuple[Host, Host]) -> None:
    here, there = pair
    with engine(here, "scheduler") as prefill, engine(there) as decode, ExitStack() as stack:
        grant = there.grant(PROMPT, checkpoint_tokens=40)
        lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
        ticket = msgspec.json.encode(lease.ticket).decode()
        processes: list[subprocess.Popen[str]] = []
        for rank in range(2):
            arguments = [str(here.socket), ticket, str(rank), "2", "0", "1", str(TOKENS)]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.kvd.engine_socket.ranks", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait, PATIENCE_S)
            stack.callback(process.communicate)  # ends its standard input, and so the process
            processes.append(process)
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "written\n"
        commit_and_read(pair, grant, lease, prefill, decode)


def test_a_segment_is_sent_only_when_every_head_is_written(pair: tuple[Host, Host]) -> None:
    here, there = pair
    first, second = Rank(0, 2), Rank(1, 2)
    with engine(here) as prefill, engine(there) as decode:
        grant = there.grant(PROMPT)
        lease = begun(prefill.begin(names(PROMPT), TOKENS, checkpoint_tokens=(), grant=grant))
        first.write(lease, PROMPT, chunk_tokens=8)
        prefill.flush()
        latent = SPEC["full1"].layer_bytes(TOKENS)  # one share, which the first rank has written
        wait_until(lambda: there.received_bytes() == latent)
        second.write(lease, PROMPT, chunk_tokens=4)
        commit_and_read(pair, grant, lease, prefill, decode)
        assert there.received_bytes() == SPEC.kv_bytes(TOKENS)


def _mislabelled(segment: Segment, heads: range, how: str) -> SegmentName | None:
    group, layer, first, count = segment.group, segment.layer, heads.start, len(heads)
    match how:
        case "missing":
            return None
        case "heads beyond the group":
            first += 1
        case "more heads than the group has":
            first, count = 0, 60_000
        case "an empty range":
            count = 0
        case "heads of the other rank":
            first = 0
        case "a layer of another group":
            layer = 1
        case "another layer":
            layer = 0
        case "an unknown layer":
            layer = 99
        case "another group":
            group = "window0"
    return SegmentName(group, layer, segment.start, segment.stop, first, count)


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "heads beyond the group",
        "more heads than the group has",
        "an empty range",
        "heads of the other rank",
        "a layer of another group",
        "another layer",
        "an unknown layer",
        "another group",
    ],
)
def test_a_mislabelled_share_never_commits(idle_pair: tuple[Host, Host], how: str) -> None:
    here, there = idle_pair
    with engine(here, "scheduler") as prefill, engine(here, "rank 1") as worker:
        with engine(there) as decode:
            grant = there.grant(PROMPT)
            lease = begun(prefill.begin(names(PROMPT), TOKENS, checkpoint_tokens=(), grant=grant))
            Rank(0, 2).write(lease, PROMPT, chunk_tokens=8)
            joined = worker.join_write(lease.ticket)
            for segment, heads in Rank(1, 2).shares(joined, 8):
                write_heads(joined, PROMPT, segment, heads)
                if segment == Segment("full0", 2, 16, 24):
                    name = _mislabelled(segment, heads, how)
                    if name is not None:  # past the client, which checks it too
                        worker._connected().ready(lease.ticket.lease_id, name)
                else:
                    joined.ready(segment, heads)
            worker.flush()
            prefill.flush()
            with pytest.raises(InputError, match="full0/2/0-42 is not ready"):
                lease.commit()
            settled = there.settled(grant)
            assert settled["state"] == "failed" and "full0/2/0-42" in settled["reason"]
            with pytest.raises(TransferFailed):
                decode.attach(grant.transfer_id)
            with begun(prefill.pin(names(PROMPT))) as kept, begun(decode.pin(names(PROMPT))) as got:
                assert kept.tokens == got.tokens == 0
            wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def _other_groups() -> dict[str, tuple[KVSpec, str]]:
    """Groups of another meaning, and how their transfer fails."""
    full, window, linear = SPEC["full0"], SPEC["window0"], SPEC["linear0"]
    assert isinstance(full, FullAttention) and isinstance(linear, LinearState)
    as_full = FullAttention("window0", window.layers, full.bytes_per_token, window.heads)
    renamed = {"full0": "full1", "full1": "full0"}
    changes: dict[str, tuple[Group, str]] = {
        "wider elements": (
            replace(full, bytes_per_token=2 * full.bytes_per_token),
            "grant allows",
        ),
        "narrower elements": (
            replace(full, bytes_per_token=full.bytes_per_token // 2),
            "bytes, 160 are expected",
        ),
        "a shorter state": (
            replace(linear, state_bytes=linear.state_bytes - 4),
            "bytes, 216 are expected",
        ),
        "another layer": (replace(linear, layers=(1, 6)), "layer 6 is not in that group"),
        "a window as full attention": (as_full, "grant allows"),
    }
    found = {
        how: (KVSpec(tuple(group if g.name == group.name else g for g in SPEC.groups)), says)
        for how, (group, says) in changes.items()
    }
    swapped = tuple(replace(g, name=renamed.get(g.name, g.name)) for g in SPEC.groups)
    return found | {"swapped roles": (KVSpec(swapped), "is not in that group")}


@pytest.mark.parametrize("how", _other_groups())
def test_groups_of_another_meaning_never_commit(tmp_path: Path, how: str) -> None:
    """A sender that claims the receiver's format, and has other groups: the receiver has the last
    word on what a segment is."""
    spec, says = _other_groups()[how]
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d") as there:
        with engine(there) as decode, here.engine("other", spec=spec) as prefill:
            grant = there.grant(PROMPT)
            problem = ""
            try:
                lease = begun(
                    prefill.begin(names(PROMPT), TOKENS, checkpoint_tokens=(), grant=grant)
                )
                for segment in resume_segments(spec, TOKENS):
                    lease.ready(segment)
                lease.commit()
                problem = there.settled(grant)["reason"]
            except InputError as error:  # by the sender's own kvd
                problem = str(error)
            assert says in problem
            with pytest.raises(TransferFailed):
                decode.attach(grant.transfer_id)
            with begun(decode.pin(names(PROMPT))) as found:
                assert found.tokens == 0


@pytest.mark.parametrize(
    "heads", [range(2, 5), range(-1, 2), range(0), range(3, 3), range(0, 4, 2)]
)
def test_the_client_refuses_heads_that_the_group_does_not_have(
    idle_pair: tuple[Host, Host], heads: range
) -> None:
    with engine(idle_pair[0]) as prefill:
        lease = begun(prefill.begin(names(PROMPT), TOKENS))
        with pytest.raises(InputError, match=r"heads of full0 are range\(0, 4\)"):
            lease.ready(Segment("full0", 0, 0, 4), heads)
        with pytest.raises(InputError, match=r"heads of full1 are range\(0, 1\)"):
            lease.ready(Segment("full1", 5, 0, 4), range(0, 2))
