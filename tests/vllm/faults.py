"""Faults that several tests put between a pair of servers, and what must follow from each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from prfaas.config.address import parse_address
from prfaas.types import Grant
from tests.transport.proxy import Meddle, Proxy
from tests.vllm.cases import MAX_TOKENS, PROMPTS, Case
from tests.waiting import wait_until

DAMAGE_FROM = 1 << 14  # bytes of a connection: beyond greetings and manifests


class Damage:
    """Flips one bit of every piece that a connection carries beyond `DAMAGE_FROM`."""

    def __init__(self, *, at_most: int | None) -> None:
        self.done = 0
        self._at_most = at_most

    def __call__(self, connection: int, before: int, data: bytes) -> bytes:
        enough = self._at_most is not None and self.done >= self._at_most
        if before < DAMAGE_FROM or enough:
            return data
        self.done += 1
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 0x10
        return bytes(damaged)


@contextmanager
def relayed(grant: Grant, forward: Meddle) -> Iterator[Grant]:
    """The same grant by way of a relay that meddles."""
    target = tuple(parse_address(grant.data_address, "the grant"))
    with Proxy(target, forward=forward) as proxy:
        yield msgspec.structs.replace(grant, data_address=f"127.0.0.1:{proxy.address[1]}")


def check_lost(case: Case, prompt: list[int], transfer_id: str) -> None:
    """A clear error, by which a gateway re-issues; the prompt is not computed in silence."""
    assert case.pair.resume(prompt, MAX_TOKENS, transfer_id).status == 500


def check_unharmed(case: Case) -> None:
    """Nothing is held any more, and the same pair still answers rightly."""
    wait_until(case.pair.nothing_held)
    for server in (case.pair.prefill, case.pair.decode):
        assert server.process.poll() is None and server.healthy(), server.log.read_text()[-3000:]
    prompt, expected = PROMPTS["edges"][2], case.model.expected["edges"][2]
    assert case.pair.generate(prompt, len(prompt) - 1, MAX_TOKENS).same(expected)
    wait_until(case.pair.nothing_held)
