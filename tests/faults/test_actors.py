"""The hostile actors stay within their bounds, and see what servers do."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from prfaas.config.gateway import GatewaySection
from prfaas.contracts.kvd_api import KvdReport
from prfaas.security.shared_key import SharedKey
from prfaas_lab.faults.actors import bodies
from prfaas_lab.faults.actors.budget import BURST_S, CpuBudget
from prfaas_lab.faults.actors.connections import OVERDUE, UNDER_WAY, Network, Place, http_request
from prfaas_lab.faults.actors.fake_kvd import MANNERS, FakeKvd
from prfaas_lab.faults.actors.lanes import Lane, run_lanes
from prfaas_lab.faults.actors.situation import Census
from prfaas_lab.faults.actors.tenant import WORK_AT_ONCE
from prfaas_lab.testing.hostile import mutate_bytes, mutate_json

MODEL = "m"


class Machine:
    """A core whose time passes only by work and sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.used_s = 5.0  # of the process before its budget began

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.used_s += seconds

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def rest(self, seconds: float) -> None:
        """As `sleep`, and others run meanwhile."""
        self.now_s += seconds
        await asyncio.sleep(random.Random(self.now_s).choice((0.0, 0.001)))


async def test_the_actors_take_no_more_than_a_quarter_of_a_core() -> None:
    machine = Machine()
    budget = CpuBudget(
        used_s=lambda: machine.used_s, now_s=lambda: machine.now_s, sleep=machine.sleep
    )
    draw, longest_s = random.Random(1), 0.02
    for _ in range(5_000):
        await budget.turn()
        machine.work(draw.uniform(0.0, longest_s))
        assert machine.used_s - 5.0 <= 0.25 * machine.now_s + BURST_S + longest_s
    assert 0.2 < budget.used_share <= 0.26, "and not much less"


async def test_turns_are_taken_in_the_order_in_which_they_were_asked_for() -> None:
    machine = Machine()
    budget = CpuBudget(
        used_s=lambda: machine.used_s, now_s=lambda: machine.now_s, sleep=machine.rest
    )
    asked, taken = random.Random(3).sample(range(100), 100), list[int]()

    async def act(number: int) -> None:
        await budget.turn()
        taken.append(number)
        machine.work(0.05)

    async with asyncio.TaskGroup() as group:
        for number in asked:
            group.create_task(act(number))
    assert taken == asked


async def test_rest_of_an_actor_is_not_a_servers_silence() -> None:
    """The server answers something that is not HTTP and closes; the actor may use no CPU time."""
    census = Census()
    spent = False
    budget = CpuBudget(used_s=lambda: 1e9 if spent else 0.0)
    async with server(b"\x00\x01") as place:
        network = Network(budget, census)
        async with network.connection(place) as (reader, _):
            spent = True
            async with asyncio.timeout(30.0):
                assert await network._see(reader) == "closed"


def test_bodies_are_as_long_as_a_gateway_accepts() -> None:
    most = GatewaySection().max_body_mb * 10**6
    for kind, made in bodies.refused_bodies(MODEL, 1_000).items():
        for body in made:
            assert len(body) < most, kind
    assert len(bodies.with_field(MODEL, "x", bodies.brackets())) > 0.9 * most


@pytest.mark.parametrize(
    "value",
    [
        bodies.brackets(100),
        bodies.nested(50),
        bodies.digits(50),
        bodies.escapes(60),
        bodies.biases(5),
    ],
)
def test_a_hurtful_body_is_valid_json(value: bytes) -> None:
    """Otherwise a parser would refuse it before it hurts."""
    assert json.loads(bodies.with_field(MODEL, "x", value))["prompt"] == [1, 2, 3]
    assert json.loads(bodies.fields(MODEL, 1_000))["x1"] == 1
    assert len(json.loads(b"salt".join(bodies.long_prompt(MODEL, 9)))["prompt"]) == 9


@pytest.mark.parametrize("kind", list(WORK_AT_ONCE))
def test_a_body_that_asks_for_much_work_is_small_and_of_a_valid_form(kind: str) -> None:
    draw, made = random.Random(1), list[bytes]()
    for number in range(20):
        made.append(bodies.work_body(kind, MODEL, draw, f"salt {number}"))
    assert len(set(made)) == len(made), "no two of them share what a cache could keep"
    for body in made:
        assert len(body) < 1 << 20 and json.loads(body)["model"] == MODEL


def test_compressed_text_is_a_hundred_times_shorter() -> None:
    packed = bodies.compressed_text(MODEL, 1_000_000)
    assert 100 * len(packed) < len(gzip.decompress(packed))


def test_damaged_messages_differ_from_valid_ones() -> None:
    draw, valid = random.Random(2), {"a": [1, {"b": "c"}], "d": 0.5}
    damaged = [mutate_json(valid, draw) for _ in range(200)]
    assert sum(one != json.dumps(valid).encode() for one in damaged) > 190
    assert len({mutate_bytes(b"x" * 100, draw) for _ in range(200)}) > 150
    assert mutate_bytes(b"", draw) is not None


@asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[Place]:
    """Sends `answer` and closes; None: stays silent."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if answer is not None:
            writer.write(answer)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield Place("127.0.0.1", listening.sockets[0].getsockname()[1])
        for writer in writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "HTTP 429"),
        (b"", "closed"),
        (b"\x00\x01", "closed"),
        (None, OVERDUE),
    ],
)
async def test_an_actor_sees_whether_a_server_answers_or_closes(
    answer: bytes | None, seen: str
) -> None:
    census = Census()
    network = Network(CpuBudget(), census)
    limit_s = 30.0 if answer is not None else 0.05
    async with server(answer) as place:
        pieces = http_request("GET", "/", "key")
        assert await network.deed("kind", place, pieces, limit_s) == seen
    counts = census.deeds["kind"]
    assert counts.answers == {seen: 1} and counts.overdue == (seen == OVERDUE)
    assert await network.deed("kind", place, pieces, limit_s) == "refused"


async def test_a_deed_that_the_end_interrupts_counts() -> None:
    """A server may hold an idle connection for longer than the actors run."""
    census = Census()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        network, place = Network(CpuBudget(), census), Place(*silent.getsockname())
        deed = asyncio.create_task(network.deed("kind", place, [b""], 30.0))
        await asyncio.sleep(0)
        deed.cancel()
        await asyncio.wait({deed})
    assert census.deeds["kind"].answers == {UNDER_WAY: 1}


async def test_a_defect_of_one_actor_does_not_end_the_others() -> None:
    census = Census()
    network = Network(CpuBudget(), census)
    worked = asyncio.Event()

    async def fail(kind: str, draw: random.Random) -> None:
        raise KeyError("a defect")

    async def work(kind: str, draw: random.Random) -> None:
        if census.failures:
            worked.set()

    lanes = [Lane("fails", fail, pause_s=0.0), Lane("works", work, pause_s=0.0)]
    running = asyncio.create_task(run_lanes(lanes, network, "seed"))
    async with asyncio.timeout(30.0):
        await worked.wait()
    running.cancel()
    await asyncio.wait({running})
    assert census.failures[0].startswith("fails: KeyError")


@pytest.mark.parametrize("manner", MANNERS)
async def test_a_fake_kvd_proves_its_membership_and_never_has_the_served_model(
    manner: str,
) -> None:
    """With the served model it could be sent requests, which a stolen key concedes."""
    key, census = SharedKey(["k" * 32]), Census()
    fake = FakeKvd(
        manner,  # type: ignore[arg-type]
        "pd",
        Network(CpuBudget(), census),
        key,
        random.Random(3),
        name="fake",
        elsewhere=["http://127.0.0.1:1"],
        links_to=["127.0.0.1:2"],
    )
    running = asyncio.create_task(fake.run())
    try:
        async with asyncio.timeout(30.0):
            url = await fake.served()
        reader, writer = await asyncio.open_connection("127.0.0.66", int(url.rpartition(":")[2]))
        body = b'{"challenge":"%b"}' % (b"0" * 32)
        writer.write(b"".join(http_request("POST", "/v1/prove", None, body)))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        proofs = msgspec.json.decode(await reader.readexactly(length))["proofs"]
        assert key.verifies(proofs, "0" * 32, url)
        writer.close()
    finally:
        running.cancel()
        await asyncio.wait({running})
    report = msgspec.json.decode(msgspec.json.encode(fake.report()), type=KvdReport)
    assert report.pool is not None and report.pool.compat.model == "another-model"
    assert not census.failures
