"""Mutated frames to the data port of a `prfaas kvd` process whose bytes move through a worker.

The frames are those of a hand-off, recorded between two kvds and sent again under new grants, and
frames without a grant. Meanwhile the kvds hand prompts over to each other.
"""

from __future__ import annotations

import random
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from prfaas.config.address import parse_address
from prfaas.errors import WireError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.transport.grants import transfer_key
from prfaas.transport.wire import (
    CHECKED,
    HEADER_BYTES,
    PIECE_BYTES,
    Decoder,
    Frame,
    Kind,
    auth_of,
    encode_data,
    encode_message,
    parse_header,
    parse_table,
)
from prfaas.types import Grant, NotNow
from prfaas_lab.testing.hostile import mutate_bytes
from tests.kvd.fuzz.oracle import FuzzFailure
from tests.kvd.fuzz.sockets import (
    CONFIGURED,
    ONE_CONNECTION,
    RSS_GROWTH,
    Usage,
    check_log,
    hand_over,
    wait_idle,
)
from tests.kvd.hosts import (
    Host,
    HostProcess,
    assert_holds,
    begun,
    fill,
    kvd_process,
    names,
    prompt_of,
)
from tests.transport.fuzz import seeds
from tests.transport.proxy import Proxy
from tests.waiting import PATIENCE_S

CLIENTS = 3
TOKENS = 41
RECORDED = prompt_of(TOKENS, seed=90)
_RESET = struct.pack("ii", 1, 0)
_FIRST_TOKEN = 1_000  # prompts of mutated transfers: no other prompt has such tokens


@dataclass
class FrameOutcome:
    frames: int = 0  # mutated
    valid: int = 0
    connections: int = 0
    committed: int = 0  # transfers with mutated frames among theirs
    hand_overs: int = 0  # between the kvds, meanwhile
    answers: Counter[str] = field(default_factory=Counter)


def fuzz_data_port(
    wanted: int, seed: int, *, show: Callable[[float], None] = lambda _: None
) -> FrameOutcome:
    """Sends at least `wanted` mutated frames. FuzzFailure when the kvd has a defect."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (*CONFIGURED, "--set", "kvd.workers=1")
        with (
            kvd_process(Path(folder), *arguments, name="fuzzed") as fuzzed,
            kvd_process(Path(folder), *ONE_CONNECTION, name="other") as other,
        ):
            campaign = _FrameCampaign(fuzzed, wanted, seed, show)
            try:
                campaign.run(other)
            except BaseException as error:
                log = (Path(folder) / "fuzzed.log").read_text(errors="replace")
                raise FuzzFailure(f"seed {seed}: {error!r}\n{log[-3_000:]}") from error
        check_log((Path(folder) / "fuzzed.log").read_text(errors="replace"))
    return campaign.outcome


class _FrameCampaign:
    def __init__(
        self, kvd: HostProcess, wanted: int, seed: int, show: Callable[[float], None]
    ) -> None:
        self.outcome = FrameOutcome()
        self._kvd = kvd
        self._wanted = wanted
        self._seed = seed
        self._show = show
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._numbers = count()

    def run(self, other: Host) -> None:
        recorded = record_hand_over(other, self._kvd)
        self._hand_over_both(other)
        wait_idle(self._kvd)
        before = Usage.of(self._kvd.process.pid)
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            clients = [pool.submit(self._client, one, recorded) for one in range(CLIENTS)]
            between = pool.submit(self._keep_handing_over, other)
            try:
                for client in clients:
                    client.result()
            finally:
                self._over.set()
            between.result()
        if self._kvd.process.poll() is not None:
            raise FuzzFailure(f"the kvd has exited with {self._kvd.process.returncode}")
        wait_idle(self._kvd)
        self._hand_over_both(other)
        wait_idle(self._kvd)
        before.wait_until_returned(self._kvd.process.pid, RSS_GROWTH)

    def _hand_over_both(self, other: Host) -> None:
        hand_over(other, self._kvd, next(self._numbers))
        hand_over(self._kvd, other, next(self._numbers))

    def _keep_handing_over(self, other: Host) -> None:
        while not self._over.is_set():
            self._hand_over_both(other)
            self.outcome.hand_overs += 2

    # Clients --------------------------------------------------------------------------------------

    def _client(self, number: int, recorded: list[Frame]) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        strangers = [Sent(frame) for frame in seeds()]
        try:
            with self._kvd.engine(f"reader-{number}") as reader:
                while self.outcome.frames < self._wanted and not self._over.is_set():
                    if rng.random() < 0.1:
                        frames = rng.choices(strangers, k=4)
                        self._send([mutated(frame, rng) for frame in frames], rng)
                    else:
                        self._transfer(recorded, reader, rng)
        except BaseException:
            self._over.set()
            raise

    def _transfer(self, recorded: list[Frame], reader: KvdClient, rng: random.Random) -> None:
        """Under a grant of its own: the recorded frames, and mutated copies of them."""
        first = _FIRST_TOKEN + TOKENS * next(self._numbers)
        grant = self._kvd.open(range(first, first + TOKENS))
        if isinstance(grant, NotNow):  # abandoned grants fill the memory for two seconds
            self._over.wait(0.05)
            return
        hello, opening, *data = (Sent(encoded(frame, grant)) for frame in recorded)
        # Most connections survive these, the others do not.
        frames = [damaged(rng.choice(data), rng) for _ in range(rng.choice((0, 10, 30)))]
        frames = [hello, opening, *frames, *data]
        if rng.random() < 0.5:
            at = rng.randrange(len(frames))
            change = misplaced if frames[at] in data and rng.random() < 0.5 else mutated
            frames[at] = change(frames[at], rng)
        self._send(frames, rng)
        if not all(frame.safe for frame in frames):
            self._abort(grant)  # the sender is trusted: what it sends may be wrong, and arrive
        elif self._kvd.transfer(grant)["state"] == "committed":
            with reader.attach(grant.transfer_id) as state:
                assert_holds(state, RECORDED, TOKENS)
            with self._lock:
                self.outcome.committed += 1
        elif rng.random() < 0.5:
            self._abort(grant)

    def _abort(self, grant: Grant) -> None:
        self._kvd.post(f"/v1/transfers/{grant.transfer_id}/abort", {})

    def _send(self, frames: list[Sent], rng: random.Random) -> None:
        """Sends the frames on one connection."""
        changed = sum(frame.mutated for frame in frames)
        with self._lock:
            self.outcome.connections += 1
            self.outcome.frames += changed
            self.outcome.valid += len(frames) - changed
            self._show(self.outcome.frames)
        data, decoder = b"".join(frame.data for frame in frames), Decoder()
        address = tuple(parse_address(self._kvd.data, "data"))
        with socket.create_connection(address, PATIENCE_S) as sock:
            try:
                if rng.random() < 0.1:
                    sock.sendall(data[: rng.randrange(len(data) + 1)])
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    return
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while received := sock.recv(1 << 16):
                    kinds = [frame.header.kind.name for frame in decoder.feed(received)]
                    with self._lock:
                        self.outcome.answers.update(kinds)
            except TimeoutError:
                raise FuzzFailure("the kvd keeps a connection that its peer has closed") from None
            except OSError:
                pass  # the kvd has cut the connection


# Frames -------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    data: bytes
    mutated: bool = False
    safe: bool = True  # its checksum shows every change


def mutated(frame: Sent, rng: random.Random) -> Sent:
    data = mutate_bytes(frame.data, rng, HEADER_BYTES)
    try:
        safe = bool(parse_header(data).flags & CHECKED)
    except (WireError, struct.error):
        safe = True
    return Sent(data, True, safe)


def damaged(frame: Sent, rng: random.Random) -> Sent:
    """A DATA frame with another byte in the payload."""
    data = bytearray(frame.data)
    at = rng.randrange(HEADER_BYTES + parse_header(data).pieces * PIECE_BYTES, len(data))
    data[at] ^= rng.randrange(1, 256)
    return Sent(bytes(data), True)


def misplaced(frame: Sent, rng: random.Random) -> Sent:
    """A DATA frame with a right checksum and a piece that belongs to another place, or to none."""
    header = parse_header(frame.data)
    end = HEADER_BYTES + header.pieces * PIECE_BYTES
    pieces = parse_table(frame.data[HEADER_BYTES:end], header)
    at = rng.randrange(len(pieces))
    change = rng.choice(
        (
            {"segment": rng.choice((0, 1, len(pieces), 2**32 - 1))},
            {"offset": rng.choice((1, 64 << 10, 1 << 40, 2**64 - 1))},
            {"codec": rng.randrange(256)},
        )
    )
    pieces[at] = pieces[at]._replace(**change)
    head = encode_data(
        pieces,
        [frame.data[end:]],
        sequence=header.sequence,
        transfer_id=header.transfer_id,
        auth=header.auth,
        checked=True,
    )
    return Sent(bytes(head) + frame.data[end:], True, safe=False)


# Recording ----------------------------------------------------------------------------------------


def record_hand_over(prefill: Host, decode: Host) -> list[Frame]:
    """The frames of a hand-off on one connection: HELLO, OPEN and DATA."""
    decoders: dict[int, Decoder] = {}
    frames: dict[int, list[Frame]] = {}
    lock = threading.Lock()

    def record(connection: int, seen: int, data: bytes) -> bytes:
        with lock:
            frames.setdefault(connection, [])
            decoder = decoders.setdefault(connection, Decoder(1 << 24))
            frames[connection] += decoder.feed(data)
        return data

    with Proxy(tuple(parse_address(decode.data, "data")), forward=record) as proxy:
        via = f"127.0.0.1:{proxy.address[1]}"
        with prefill.engine("sender") as sender, decode.engine("receiver") as receiver:
            grant = msgspec.structs.replace(decode.grant(RECORDED), data_address=via)
            lease = begun(sender.begin(names(RECORDED), TOKENS, grant=grant))
            fill(lease, RECORDED)
            lease.commit()
            state = decode.settled(grant)
            assert state["state"] == "committed", state
            receiver.attach(grant.transfer_id).release()
    every = [frame for found in frames.values() for frame in found]
    by_kind = {
        kind: [frame for frame in every if frame.header.kind is kind]
        for kind in (Kind.HELLO, Kind.OPEN, Kind.DATA)
    }
    return [by_kind[Kind.HELLO][0], by_kind[Kind.OPEN][0], *by_kind[Kind.DATA]]


def encoded(frame: Frame, grant: Grant) -> bytes:
    """The frame under this grant."""
    header = frame.header
    if header.kind is Kind.HELLO:
        return encode_message(Kind.HELLO, frame.body)
    key, auth = transfer_key(grant.transfer_id), auth_of(grant.token)
    if header.kind is not Kind.DATA:
        return encode_message(header.kind, frame.body, transfer_id=key, auth=auth)
    table_bytes = header.pieces * PIECE_BYTES
    table, payload = frame.body[:table_bytes], frame.body[table_bytes:]
    head = encode_data(
        parse_table(table, header),
        [payload],
        sequence=header.sequence,
        transfer_id=key,
        auth=auth,
        checked=True,
    )
    assert len(head) == HEADER_BYTES + table_bytes
    return bytes(head) + payload
