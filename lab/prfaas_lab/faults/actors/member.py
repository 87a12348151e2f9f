"""The hostile member: registers kvds of its own with a stolen member key."""

from __future__ import annotations

import asyncio
import random

import msgspec

from prfaas.contracts.kvd_api import Heartbeat
from prfaas.security.shared_key import SharedKey
from prfaas_lab.faults.actors.connections import (
    SOURCE,
    Network,
    byte_by_byte,
    http_head,
    http_request,
    place_of,
)
from prfaas_lab.faults.actors.fake_kvd import MANNERS, FakeKvd
from prfaas_lab.faults.actors.lanes import Lane, run_lanes
from prfaas_lab.faults.actors.situation import Situation
from prfaas_lab.testing.hostile import mutate_json

REGISTER = "/prfaas/v1/register"
HEARTBEAT_S = 2.0
ANSWER_S = 60.0  # for the answer to a heartbeat; the gateway's limit for a body is 30 s
HUGE_BYTES = 40 << 20


class HostileMember:
    def __init__(self, network: Network, situation: Situation) -> None:
        self._network = network
        self._gateways = [place_of(url) for url in situation.gateways]
        self._member_key = situation.member_key
        self._seed = situation.seed
        self._elsewhere = [
            *(kvd.http for kvd in situation.kvds),
            *situation.engines,
            *situation.gateways,
            "http://169.254.169.254:80",
            f"http://{SOURCE}:1",
        ]
        self._huge_bodies: list[bytes] = []
        key = SharedKey([situation.member_key])
        clusters = sorted({kvd.cluster for kvd in situation.kvds})
        self.fakes = [
            FakeKvd(
                manner,
                clusters[number % len(clusters)],
                network,
                key,
                random.Random(f"{situation.seed} {manner}"),
                name=situation.kvds[number % len(situation.kvds)].node
                if manner == "borrows a name"
                else f"fake-{number}",
                elsewhere=self._elsewhere,
                links_to=[kvd.data for kvd in situation.kvds],
            )
            for number, manner in enumerate(MANNERS)
            if situation.borrows_names or manner != "borrows a name"
        ]

    def prepare(self) -> None:
        """Makes the long bodies, which takes seconds. They are kept."""
        whole = self._heartbeat(self.fakes[0])
        self._huge_bodies = [
            whole[:-1] + b',"x":[' + b"[]," * (HUGE_BYTES // 3) + b"[]]}",
            whole.replace(b'"incoming":{}', b'"incoming":{' + _many_fields() + b"}"),
        ]

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            for fake in self.fakes:
                group.create_task(fake.run())
            group.create_task(run_lanes(self._lanes, self._network, f"{self._seed} member"))

    @property
    def _lanes(self) -> list[Lane]:
        return [
            Lane("member: heartbeats", self._heartbeats, pause_s=HEARTBEAT_S),
            Lane("member: malformed heartbeat", self._malformed),
            Lane("member: huge heartbeat", self._huge, pause_s=1.0),
            Lane("member: slow heartbeat", self._slow, 4),
            Lane("member: URL of another service", self._foreign, 2, pause_s=0.2),
            Lane("member: URL that is not one", self._odd_url),
            Lane("member: without the key", self._no_key),
        ]

    def _heartbeat(self, fake: FakeKvd) -> bytes:
        return msgspec.json.encode(Heartbeat(fake.url, fake.cluster, fake.report()))

    async def _register(self, kind: str, draw: random.Random, body: bytes) -> None:
        pieces = http_request("POST", REGISTER, self._member_key, body)
        await self._network.deed(kind, draw.choice(self._gateways), pieces, ANSWER_S)

    async def _heartbeats(self, kind: str, draw: random.Random) -> None:
        """One of each fake kvd to each gateway, all at once."""
        sending = []
        for fake in self.fakes:
            for gateway in self._gateways:
                if fake.url:
                    body = self._heartbeat(fake)
                    pieces = http_request("POST", REGISTER, self._member_key, body)
                    sending.append(self._network.deed(kind, gateway, pieces, ANSWER_S))
        await asyncio.gather(*sending)

    async def _malformed(self, kind: str, draw: random.Random) -> None:
        tree = msgspec.to_builtins(msgspec.json.decode(self._heartbeat(draw.choice(self.fakes))))
        await self._register(kind, draw, mutate_json(tree, draw))

    async def _huge(self, kind: str, draw: random.Random) -> None:
        await self._register(kind, draw, draw.choice(self._huge_bodies))

    async def _slow(self, kind: str, draw: random.Random) -> None:
        body = self._heartbeat(draw.choice(self.fakes))
        head = http_head("POST", REGISTER, self._member_key, length=len(body))

        place = draw.choice(self._gateways)
        pieces = byte_by_byte(head, body)
        await self._network.deed(kind, place, pieces, ANSWER_S, every_s=0.5)

    async def _foreign(self, kind: str, draw: random.Random) -> None:
        """The gateway would send the member key to a service that the member chose."""
        url, fake = draw.choice(self._elsewhere), draw.choice(self.fakes)
        body = msgspec.json.encode(Heartbeat(url, fake.cluster, fake.report()))
        await self._register(kind, draw, body)

    async def _odd_url(self, kind: str, draw: random.Random) -> None:
        url = draw.choice(
            (
                f"http://{'x' * 70}.example:7401",
                "http://a..b:7401",
                "http://h:7401/v1",
                "http://user:key@h:7401",
                "http://h:70000",
                "http://h:7401\r\nX: y",
                "http://[::1:7401",
                "",
                "x" * 100_000,
            )
        )
        fake = draw.choice(self.fakes)
        cluster = draw.choice((fake.cluster, "no-such-cluster", ""))
        body = msgspec.json.encode(Heartbeat(url, cluster, fake.report()))
        await self._register(kind, draw, body)

    async def _no_key(self, kind: str, draw: random.Random) -> None:
        body = self._heartbeat(draw.choice(self.fakes))
        wrong = draw.choice((None, "x" * 64, self._member_key[:-1]))
        pieces = http_request("POST", REGISTER, wrong, body)
        await self._network.deed(kind, draw.choice(self._gateways), pieces, ANSWER_S)


def _many_fields() -> bytes:
    return b",".join(b'"x%d":1' % n for n in range(HUGE_BYTES // 12))
