"""One prefix that many requests share, and a deployment with two nodes at home that prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from prfaas.cache.hashing import PromptHashes
from prfaas.config.deployment import Deployment
from prfaas.contracts.kvd_api import MatchPrefix
from prfaas.gateway.backend import GatewayBackend
from prfaas.types import NodeId
from tests.gateway.backends import (
    HOME,
    answered,
    gateway_request,
    prompt,
    until,
    until_it_would_resume,
)
from tests.gateway.conftest import Hosts
from tests.node.hosts import Host, call

SHARED_TOKENS = 32_768  # where a checkpoint of its state is kept; far longer to compute than to ...
OWN_TOKENS = 200  # ... wait for a dozen of these


def deployment(hosts: Hosts, **moves: Any) -> Deployment:
    """Everything stays at home, over whose fabric routes do not find a copy worth its time."""
    return hosts.deployment(
        prefill=2,
        policy="local",
        links=[{"from": HOME, "to": HOME, "gbps": 0.01}],
        moves=moves,
    )


class Crowd:
    """Requests of one tenant, each with a question of its own behind the shared prefix."""

    def __init__(self, hosts: Hosts, backend: GatewayBackend, salt: str) -> None:
        self._hosts = hosts
        self._backend = backend
        self._salt = salt
        self._shared = prompt(SHARED_TOKENS)
        self._asked = 0

    async def send(self) -> str:
        """Who prefilled it. Its tokens are those of one process."""
        self._asked += 1
        ids = [*self._shared, *prompt(OWN_TOKENS, self._asked)]
        found = await answered(self._backend, gateway_request(ids, salt=self._salt))
        decoded = self._hosts.named(found.trace.decode)
        alone = await asyncio.to_thread(decoded.complete, ids, max_tokens=4, cache_salt="alone")
        assert found.tokens == alone["choices"][0]["token_ids"]
        return found.trace.prefill

    async def warm(self, times: int = 5) -> Host:
        """Makes it hot; who has had it first."""
        first = await self.send()
        again = gateway_request([*self._shared, *prompt(OWN_TOKENS, -1)], salt=self._salt)
        await until_it_would_resume(self._backend, again, SHARED_TOKENS)
        # Times are predicted for an engine that is not in a hurry; the node's word is final.
        await until(lambda: not self._backend.fleet.prefill_waits_s()[NodeId(first)])
        for _ in range(times):
            await self.send()
        return self._hosts.named(first)

    async def burst(self, size: int) -> None:
        await asyncio.gather(*(self.send() for _ in range(size)))

    def held_by(self, host: Host) -> int:
        """Tokens of the shared prefix, as the pool itself says."""
        hashes: Sequence[bytes] = PromptHashes(self._shared, salt=self._salt).at(64)
        body = msgspec.to_builtins(MatchPrefix(tuple(hashes)))
        status, found = call("POST", f"{host.kvd_url}/v1/match", body)
        assert status == 200, found
        tokens: int = found["tokens"]
        return tokens
