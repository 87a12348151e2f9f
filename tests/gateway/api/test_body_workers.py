"""Body workers: long bodies are read by other processes, and what happens to such a process costs
one request only."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.clock import Clock, MonotonicClock
from prfaas.engine.checkpoint.tokenizer import save_tokenizer
from prfaas.errors import InputError, RequestError
from prfaas.gateway import turns
from prfaas.gateway.api.body_limits import RequestBody
from prfaas.gateway.api.content_encoding import Encoding
from prfaas.gateway.api.request_preparation import PreparedRequest, RequestPreparer
from prfaas.gateway.api.request_schema import Kind
from prfaas.gateway.body_workers.messages import WorkerSettings
from prfaas.gateway.body_workers.pool import BodyWorkers, memory_bound
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.tenants import Tenants
from prfaas.text import load_tokenizer
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.api.api_server import api_server, joined
from tests.waiting import HANG_S, wait_until

MAX_TOKENS = 100_000
BODY_BYTES = 4_000_000


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(Path(name), max_tokens=MAX_TOKENS)
        yield Path(name)


def settings(folder: Path | None = None, **changes: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "model": "made-up",
        "max_tokens": MAX_TOKENS,
        "body_bytes": BODY_BYTES,
        "memory_bytes": memory_bound(BODY_BYTES),
        "job_s": HANG_S,
        "tokenizer_folder": None if folder is None else str(folder),
    }
    return WorkerSettings(**{**values, **changes})


@asynccontextmanager
async def pool(
    given: WorkerSettings,
    tenants: Collection[str] = ("",),
    clock: Clock | None = None,
    **options: Any,
) -> AsyncIterator[BodyWorkers]:
    who = Tenants(names=lambda: tenants)
    workers = BodyWorkers(given, who, clock or MonotonicClock(), **options)
    try:
        async with asyncio.timeout(HANG_S):
            yield workers
    finally:
        await workers.close()


def body_of(data: bytes, encoding: Encoding = "") -> RequestBody:
    body = RequestBody(encoding, inline_bytes=0)  # a short body in a file, as if it were long
    body.add(data)
    body.end()
    return body


def uncounted(nbytes: int) -> None:
    pass


async def prepare(
    workers: BodyWorkers,
    fields: Any,
    kind: Kind = "completion",
    tenant: str = "",
    encoding: Encoding = "",
    count_read: Callable[[int], None] = uncounted,
) -> PreparedRequest:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return await workers.prepare(kind, body_of(data, encoding), tenant, count_read)


def same(one: PreparedRequest, other: PreparedRequest) -> None:
    def plain(request: PreparedRequest) -> Any:
        prompts = [(ids.array.tolist(), json.loads(bytes(ids.json()))) for ids in request.prompts]
        return (
            *(prompts, request.n, msgspec.json.decode(joined(encode_body(request.fields)))),
            *(request.path, request.cache_salt, request.stream, request.shows_usage),
            *(request.conversation, request.prompt_logprobs, request.multimodal),
        )

    assert plain(one) == plain(other)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
GOOD: list[tuple[Kind, dict[str, Any]]] = [
    ("completion", {"prompt": list(range(9000)), "max_tokens": 5, "logit_bias": {"5": 1.5}}),
    ("completion", {"prompt": "once é upon", "stream": True, "cache_salt": "s", "x": [None]}),
    ("completion", {"prompt": [[1, 2]], "echo": True, "logprobs": 1, "model": "made-up"}),
    ("completion", {"prompt": [[1], list(range(9000)), [2, 3]], "n": 2}),
    ("completion", {"prompt": ["once", "é upon"], "max_tokens": 3}),
    ("chat", {"messages": [{"role": "user", "content": "hi"}], "tools": []}),
    ("either", {"messages": [{"role": "user", "content": [IMAGE]}], "documents": [{"a": 1}]}),
    ("either", {"prompt": [7], "stream": True, "stream_options": {"include_usage": True}}),
]
BAD: list[tuple[Kind, dict[str, Any]]] = [
    ("completion", {"prompt": [1, -1]}),
    ("completion", {"prompt": [1], "model": "another"}),
    ("completion", {"prompt": "x" * (MAX_TOKENS + 1)}),
    ("completion", {"prompt": [1], "chat_template": "x"}),
    ("chat", {"messages": [{"content": "no role"}]}),
]


async def test_a_worker_prepares_what_the_gateway_would_prepare(folder: Path) -> None:
    preparer = RequestPreparer("made-up", MAX_TOKENS, load_tokenizer(folder))
    async with pool(settings(folder)) as workers:
        for kind, fields in GOOD:
            same(
                await prepare(workers, fields, kind),
                preparer.prepare(kind, json.dumps(fields).encode()),
            )
        for kind, fields in BAD:
            with pytest.raises((InputError, RequestError)) as here:
                preparer.prepare(kind, json.dumps(fields).encode())
            with pytest.raises(type(here.value)) as there:
                await prepare(workers, fields, kind)
            assert str(there.value) == str(here.value)


def running(workers: BodyWorkers) -> list[int]:
    return [process.pid for process in workers.processes if process.pid is not None]


async def started() -> None:
    """Every task that was created has done its first steps: its job is sent, or waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def has_ended(pid: int) -> bool:
    """With all its threads: its connection is open until the last one has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


async def test_a_worker_that_dies_costs_its_own_request_only() -> None:
    lost: list[str] = []
    async with pool(settings(), workers=1, count_loss=lost.append) as workers:
        assert len((await prepare(workers, {"prompt": [1, 2]})).prompts[0]) == 2
        (first,) = running(workers)
        os.kill(first, signal.SIGSTOP)  # it takes the job and does not answer
        stuck = asyncio.create_task(prepare(workers, {"prompt": [1]}))
        next_one = asyncio.create_task(prepare(workers, {"prompt": [1, 2, 3]}))
        await started()
        assert workers.waiting == 1
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RequestError) as refused:
            await stuck
        assert (refused.value.status, refused.value.code) == (503, "body_worker_lost")
        assert len((await next_one).prompts[0]) == 3
        assert running(workers) != [first] and lost == ["died"]


async def test_a_worker_that_dies_between_two_jobs_costs_no_request() -> None:
    async with pool(settings(), workers=1) as workers:
        await prepare(workers, {"prompt": [1]})
        (first,) = running(workers)
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: has_ended(first))
        assert len((await prepare(workers, {"prompt": [1, 2]})).prompts[0]) == 2


async def test_a_body_that_takes_too_long_is_refused_and_its_worker_replaced() -> None:
    lost: list[str] = []
    async with pool(settings(job_s=0.5), workers=1, count_loss=lost.append) as workers:
        await workers.processes[0].start()
        (first,) = running(workers)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(RequestError) as refused:
            await prepare(workers, {"prompt": [1]})
        assert (refused.value.status, refused.value.code) == (400, "body_too_complex")
        assert has_ended(first) and lost == ["timeout"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", b'{"messages": [' + b"{}," * 6_000_000 + b"{}]}"),
        ("completion", b'{"prompt": "' + b"x y " * 1_500_000 + b'"}'),  # the tokenizer aborts
    ],
    ids=["messages", "text"],
)
async def test_a_body_that_takes_too_much_memory_is_refused(
    folder: Path, kind: Kind, body: bytes
) -> None:
    """The next body has all of the worker's memory again."""
    small = settings(folder, memory_bytes=300 << 20, max_tokens=10**8)
    async with pool(small, workers=1) as workers:
        with pytest.raises(RequestError) as refused:
            await prepare(workers, body, kind)
        assert (refused.value.status, refused.value.code) == (400, "body_too_complex")
        assert len((await prepare(workers, {"prompt": [1, 2]})).prompts[0]) == 2


async def test_a_worker_without_its_tokenizer_is_an_error_of_the_request(tmp_path: Path) -> None:
    async with pool(settings(tmp_path), workers=1) as workers:
        for _ in range(2):
            with pytest.raises(RequestError) as refused:
                await prepare(workers, {"prompt": [1]})
            assert refused.value.code == "body_worker_lost"


async def stopped(workers: BodyWorkers) -> Callable[[], None]:
    """Stops the only worker; the result lets it continue."""
    await workers.processes[0].start()
    (pid,) = running(workers)
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


async def test_tenants_take_turns() -> None:
    async with pool(settings(), workers=1) as workers:
        proceed = await stopped(workers)
        order: list[str] = []

        async def send(tenant: str) -> None:
            await prepare(workers, {"prompt": [1]}, tenant=tenant)
            order.append(tenant)

        tasks = [asyncio.create_task(send("many")) for _ in range(6)]
        await started()
        assert workers.waiting == 5
        tasks.append(asyncio.create_task(send("one")))
        await started()
        assert workers.waiting == 6
        proceed()
        await asyncio.gather(*tasks)
        assert order.index("one") <= 2


async def test_bombs_of_three_tenants_leave_a_worker_for_a_fourth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compressed body of a few bytes may take a worker for seconds."""
    monkeypatch.setattr(turns, "LONG_S", 0.0)  # here these take milliseconds
    clock, bomb = FakeClock(), gzip.compress(b'{"prompt": "' + b" " * 2 * BODY_BYTES)
    async with pool(settings(), tenants=["x", "y", "z", "fourth"], clock=clock) as workers:

        async def send_bomb(tenant: str) -> None:
            with pytest.raises(RequestError) as refused:
                await prepare(workers, bomb, tenant=tenant, encoding="gzip")
            assert refused.value.status == 413

        for process in workers.processes:
            await process.start()
        for tenant in "xyz":
            await send_bomb(tenant)
        flood = [asyncio.create_task(send_bomb(tenant)) for tenant in "xyz" * 4]
        await started()
        assert workers.waiting == len(flood) - 1
        fourth = asyncio.create_task(prepare(workers, {"prompt": [1, 2]}, tenant="fourth"))
        await started()
        assert workers.waiting == len(flood) - 1, "the fourth tenant's body waits for no other"
        assert len((await fourth).prompts[0]) == 2
        await asyncio.gather(*flood)


async def test_what_a_worker_reads_is_counted_also_when_the_body_is_refused() -> None:
    counted: list[int] = []
    text = json.dumps({"prompt": [1, 2], "user": "x" * 500_000}).encode()
    bodies = {
        200: gzip.compress(text),
        413: gzip.compress(bytes(2 * BODY_BYTES)),
        400: gzip.compress(json.dumps({"prompt": "x" * 1_000_000}).encode()),
    }
    async with pool(settings(), workers=1) as workers:
        await prepare(workers, text, count_read=counted.append)
        for status, body in bodies.items():
            try:
                await prepare(workers, body, encoding="gzip", count_read=counted.append)
            except (InputError, RequestError) as error:
                assert status == (error.status if isinstance(error, RequestError) else 400)
            else:
                assert status == 200
    assert counted[:2] == [len(text)] * 2
    assert BODY_BYTES < counted[2] <= 2 * BODY_BYTES and counted[3] > 1_000_000


async def test_what_a_worker_reads_is_counted_also_when_the_client_leaves() -> None:
    counted: list[int] = []
    body = gzip.compress(b'{"prompt": [1]}')
    async with pool(settings(), workers=1) as workers:
        proceed = await stopped(workers)
        leaving = asyncio.create_task(
            prepare(workers, body, encoding="gzip", count_read=counted.append)
        )
        await started()
        leaving.cancel()
        proceed()
        await prepare(workers, {"prompt": [1, 2]})
    assert counted == [len(b'{"prompt": [1]}')]


async def test_a_body_that_takes_too_long_counts_as_all_that_it_may_have_been() -> None:
    counted: list[int] = []
    async with pool(settings(job_s=0.5), workers=1) as workers:
        await stopped(workers)
        with pytest.raises(RequestError):
            body = gzip.compress(bytes(2 * BODY_BYTES))
            await prepare(workers, body, encoding="gzip", count_read=counted.append)
        assert len(counted) == 1 and counted[0] >= BODY_BYTES


PROGRAM = """
import asyncio, sys
from prfaas.clock import MonotonicClock
from prfaas.gateway.body_workers.messages import WorkerSettings
from prfaas.gateway.body_workers.pool import BodyWorkers
from prfaas.gateway.tenants import Tenants

async def main():
    settings = WorkerSettings("made-up", 1000, 1000, 1 << 30, 60.0)
    workers = BodyWorkers(settings, Tenants(), MonotonicClock())
    await asyncio.gather(*(process.start() for process in workers.processes))
    print(*(process.pid for process in workers.processes), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_workers_end_with_the_gateway_also_when_it_is_killed() -> None:
    gateway = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    pids = [int(word) for word in gateway.stdout.readline().split()]
    assert len(pids) == 2 and not any(map(has_ended, pids))
    gateway.kill()
    gateway.communicate()
    wait_until(lambda: all(map(has_ended, pids)), within_s=HANG_S)


def test_a_worker_leaves_signals_to_its_gateway() -> None:
    """Ctrl-C and a service manager's SIGTERM reach all processes of a gateway, which drains."""
    gateway = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    pids = [int(word) for word in gateway.stdout.readline().split()]
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert ignored >> (number - 1) & 1
    gateway.kill()
    gateway.communicate()


async def test_the_gateway_parses_no_long_body_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("a long body is parsed in the gateway's process")

    monkeypatch.setattr(RequestPreparer, "parse", parse)
    async with api_server() as server:
        long = {"prompt": [1] * 2000, "user": "x" * 100_000, "max_tokens": 1}
        assert (await server.post("/v1/completions", long))[0] == 200
        chat = {"messages": [{"role": "user", "content": "x"}], "user": "x" * 100_000}
        assert (await server.post("/v1/chat/completions", {**chat, "max_tokens": 1}))[0] == 200
        assert (await server.post("/prfaas/v1/explain", long))[1]["prompt_tokens"] == 2000
