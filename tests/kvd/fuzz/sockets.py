"""Mutated messages to a `prfaas kvd` process over its Unix socket and its HTTP port. The kvd may
have worker processes.

Half of the connections are cut at a random point: in the middle of a message, before its answer, or
with a reset.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from prfaas.contracts.kvd_api import PullPrefix
from prfaas.kvd.engine_socket.messages import FrameReader, LeaseTicket, decode_answer
from prfaas.transport.link import LinkOptions
from prfaas.types import Grant, NotNow
from prfaas_lab.faults.worker_processes import children_of
from tests.cache.builders import BLOCK
from tests.complaints import check_output
from tests.kvd.fuzz.http_responses import Responses
from tests.kvd.fuzz.oracle import FuzzFailure, open_descriptors, resident_bytes
from tests.kvd.fuzz.sessions import Granted, Memory, Model, Sessions, with_heads
from tests.kvd.fuzz.traffic import Message, Traffic, shown
from tests.kvd.hosts import (
    SPEC,
    Host,
    HostProcess,
    assert_holds,
    begun,
    fill,
    kvd_process,
    names,
    prompt_of,
)
from tests.waiting import PATIENCE_S

CLIENTS = 4  # at the same time, half of them engines
MODEL = Model(with_heads(SPEC, 4), BLOCK)  # the engines of the hand-off name no heads
ANSWER_S = 0.5  # a client leaves when it gets no answer for this long
# Transfers end soon after their clients have left.
TIMEOUTS = ("grant_s=2", "dispatch_s=2", "remember_s=2", "connect_s=1", "connection_silence_s=2")
# How many connections links have does not depend on how busy they were.
ONE_CONNECTION = ("--set", "kvd.connections=1")
CONFIGURED = (
    *(word for one in TIMEOUTS for word in ("--set", f"kvd.timeouts.{one}")),
    *ONE_CONNECTION,
    *("--node", "pool"),
)
RSS_GROWTH = 128 << 20  # of the kvd and its workers
_RESET = struct.pack("ii", 1, 0)
_OPENED: Any = Grant | NotNow


@dataclass
class SocketOutcome:
    messages: int = 0  # mutated
    valid: int = 0
    cut: int = 0  # connections
    connections: int = 0
    answers: Counter[str] = field(default_factory=Counter)


def fuzz_sockets(
    wanted: int,
    seed: int,
    *,
    workers: int = 0,
    show: Callable[[float], None] = lambda _: None,
) -> SocketOutcome:
    """Sends at least `wanted` mutated messages. FuzzFailure when the kvd has a defect."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (*CONFIGURED, "--set", f"kvd.workers={workers}")
        with (
            kvd_process(Path(folder), *arguments, name="fuzzed") as fuzzed,
            kvd_process(Path(folder), *ONE_CONNECTION, name="other") as other,
        ):
            campaign = _Campaign(fuzzed, wanted, seed, show)
            try:
                campaign.run(other)
            except BaseException as error:
                log = (Path(folder) / "fuzzed.log").read_text(errors="replace")
                said = "\n".join((*(shown(data) for data in campaign.last), log[-3_000:]))
                raise FuzzFailure(f"seed {seed}: {error!r}\n{said}") from error
        check_log((Path(folder) / "fuzzed.log").read_text(errors="replace"))
    return campaign.outcome


def check_log(text: str) -> None:
    """Errors that the process did not handle."""
    at = text.find("Traceback (most recent call last)")
    if at >= 0:
        raise FuzzFailure(f"the kvd has logged an error:\n{text[max(0, at - 500) : at + 3_000]}")
    check_output(text)


class _Campaign:
    def __init__(
        self, kvd: HostProcess, wanted: int, seed: int, show: Callable[[float], None]
    ) -> None:
        self.outcome = SocketOutcome()
        self.last: list[bytes] = []
        self._kvd = kvd
        self._wanted = wanted
        self._seed = seed
        self._show = show
        self._memory = Memory(kvd.data, "http://127.0.0.1:1", "pool")
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, other: Host) -> None:
        # Everything that stays: both storages, the links between live kvds and their threads, and
        # the threads that resolve the names of hosts.
        for compat in (MODEL.compat, MODEL.native):  # this decides how many heads the pools have
            self._kvd.engine("first", MODEL.spec, compat=compat).close()
        self._hand_over_all(other, 0)
        nowhere = PullPrefix("http://localhost:1", tuple(names(prompt_of(8))))
        assert self._kvd.post("/v1/pull", nowhere)[0] == 502
        pid = self._kvd.process.pid
        wait_idle(self._kvd)
        before = Usage.of(pid)
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            for client in clients:
                client.result()
        if self._kvd.process.poll() is not None:
            raise FuzzFailure(f"the kvd has exited with {self._kvd.process.returncode}")
        assert self._kvd.get("/health") == (200, b"ok")
        wait_idle(self._kvd)
        self._hand_over_all(other, 10)
        wait_idle(self._kvd)
        before.wait_until_returned(pid, RSS_GROWTH)

    def _hand_over_all(self, other: Host, seed: int) -> None:
        hand_over(self._kvd, other, seed)
        hand_over(other, self._kvd, seed + 1)
        hand_over(self._kvd, self._kvd, seed + 2)

    # Clients --------------------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        traffic = Traffic(Sessions(MODEL, self._memory, rng), rng)
        session = self._engine if number % 2 else self._gateway
        try:
            while self.outcome.messages < self._wanted and not self._stop.is_set():
                with suppress(OSError):  # the kvd may close a connection, as may this client
                    session(traffic, rng)
        except BaseException:
            self._stop.set()
            raise

    def _count(self, message: Message) -> None:
        with self._lock:
            self.last = [*self.last[-11:], message.data]
            if message.mutated:
                self.outcome.messages += 1
            else:
                self.outcome.valid += 1
            done = self.outcome.messages
        self._show(done)

    def _engine(self, traffic: Traffic, rng: random.Random) -> None:
        """One connection of an engine."""
        leases: dict[int, LeaseTicket] = {}
        frames = FrameReader()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self._kvd.socket))
            sock.settimeout(ANSWER_S)
            message = traffic.register(f"engine-{rng.randrange(4)}")
            for _ in range(self._length(rng)):
                self._count(message)
                sock.sendall(message.data)
                if message.cut:
                    break
                if rng.random() < 0.9:
                    self._receive_answers(sock, frames, leases)
                message = traffic.call(leases)
            self._leave(sock, rng, message.data)

    def _receive_answers(
        self, sock: socket.socket, frames: FrameReader, leases: dict[int, LeaseTicket]
    ) -> None:
        data, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:
            raise ConnectionResetError
        for body in frames.feed(data):
            answer = decode_answer(body).answer
            with self._lock:
                self.outcome.answers[type(answer).__name__] += 1
                if isinstance(answer, LeaseTicket):
                    leases[answer.lease_id] = answer
                    self._memory.leases.append(answer)

    def _gateway(self, traffic: Traffic, rng: random.Random) -> None:
        """One connection of a gateway or of another kvd."""
        url = urlsplit(self._kvd.url)
        responses = Responses()
        with socket.create_connection((url.hostname, url.port)) as sock:
            sock.settimeout(ANSWER_S)
            message = traffic.request()
            for _ in range(self._length(rng)):
                self._count(message)
                sock.sendall(message.data)
                if message.cut or not self._receive_responses(sock, responses, message):
                    break
                message = traffic.request()
            self._leave(sock, rng, message.data)

    def _receive_responses(
        self, sock: socket.socket, responses: Responses, message: Message
    ) -> bool:
        """False when the kvd has closed the connection."""
        while data := sock.recv(1 << 16):
            for status, body in responses.feed(data):
                with self._lock:
                    self.outcome.answers[f"HTTP {status}"] += 1
                    if status == 500:
                        raise FuzzFailure(f"HTTP 500: {body!r}")
                    if status == 200 and message.prompt:
                        opened = msgspec.json.decode(body, type=_OPENED)
                        if isinstance(opened, Grant):
                            self._memory.granted.append(Granted(opened, message.prompt))
                return True
        return False

    def _length(self, rng: random.Random) -> int:
        self.outcome.connections += 1
        return rng.choice((1, 5, 20, 100))

    def _leave(self, sock: socket.socket, rng: random.Random, data: bytes) -> None:
        """Half of the clients leave in the middle of a message, some of them with a reset."""
        if rng.random() < 0.5:
            self.outcome.cut += 1
            sock.sendall(data[: rng.randrange(len(data) + 1)])
            if rng.random() < 0.5 and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def hand_over(prefill: Host, decode: Host, seed: int) -> None:
    """A hand-off with equal bytes at both ends."""
    prompt = prompt_of(41, seed=100 + seed)
    with prefill.engine("sender") as sender, decode.engine("receiver") as receiver:
        grant = decode.grant(prompt)
        lease = begun(sender.begin(names(prompt), len(prompt), grant=grant))
        fill(lease, prompt)
        lease.commit()
        state = decode.settled(grant)
        if state["state"] != "committed":
            raise FuzzFailure(f"no hand-off works: {state}")
        attached = receiver.attach(grant.transfer_id)
        assert_holds(attached, prompt, len(prompt))
        attached.release()


# The oracle ---------------------------------------------------------------------------------------


def wait_idle(kvd: Host) -> None:
    """No lease, no page in use and no transfer is left; `/v1/stats` checks the pool too."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        stats = kvd.stats()
        pages, leases = kvd.in_use()
        busy = {
            "pages in use": pages,
            "leases": leases,
            "held leases": stats["held_leases"],
            "engines": len(stats["engines"]),
            **{f"incoming {s}": stats["incoming"][s] for s in ("granted", "committed")},
            **{f"outgoing {s}": n for s, n in stats["outgoing"].items()},
        }
        if not any(busy.values()):
            return
        if time.monotonic() > until_s:
            raise FuzzFailure(
                f"not ended after all clients have left: {busy}; links: {stats['links']}"
            )
        time.sleep(0.05)


@dataclass(frozen=True)
class Usage:
    """What a kvd and its workers hold."""

    workers: tuple[int, ...]  # process ids
    threads: int
    descriptors: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        workers = tuple(children_of(pid))
        every = (pid, *workers)
        return cls(
            workers,
            sum(len(os.listdir(f"/proc/{one}/task")) for one in every),
            sum(_descriptors_without_arenas(one) for one in every),
            sum(map(resident_bytes, every)),
        )

    def wait_until_returned(self, pid: int, growth_bytes: int) -> None:
        """The workers are the same processes; threads and descriptors are as many as before. A
        connection of a link to a kvd that is gone ends after a minute at the latest."""
        until_s = time.monotonic() + LinkOptions().idle_s + PATIENCE_S
        while True:
            now = Usage.of(pid)
            if now.workers != self.workers:
                raise FuzzFailure(f"workers have ended: they were {self.workers}, now {now}")
            if now.threads <= self.threads and now.descriptors <= self.descriptors:
                break
            if time.monotonic() > until_s:
                raise FuzzFailure(f"after all clients have left: {now} instead of {self}")
            time.sleep(0.1)
        if now.resident_bytes - self.resident_bytes > growth_bytes:
            raise FuzzFailure(f"memory grew: from {self} to {now}")


def _descriptors_without_arenas(process: int) -> int:
    """A worker opens an arena of its kvd at its first use, and keeps it."""
    return sum("/memfd:prfaas-kvd" not in target for _, target in open_descriptors(process))
