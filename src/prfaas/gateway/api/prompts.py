"""From a request's body to its token ids. A short body is parsed on the event loop and tokenised in
a thread; a long one is given to a worker process, because parsing holds the interpreter lock: also
in a thread it would stop every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from prfaas.gateway.api.body_limits import RequestBody
from prfaas.gateway.api.request_preparation import PreparedRequest, RequestPreparer
from prfaas.gateway.api.request_schema import Kind
from prfaas.gateway.client.token_ids import TokenIds

# Rendering and tokenising this much takes well under a millisecond: less than a thread switch.
INLINE_BYTES = 1024
THREADS = 2  # the tokenizer releases the interpreter lock
T = TypeVar("T")


class LongBodies(Protocol):
    async def prepare(self, kind: Kind, body: RequestBody, tenant: str) -> PreparedRequest:
        """Prepares a request whose body is in a file. Raises `InputError` and `RequestError`."""


class Prompts:
    def __init__(
        self, preparer: RequestPreparer, threads: ThreadPoolExecutor, long_bodies: LongBodies
    ) -> None:
        self.preparer = preparer
        self._threads = threads
        self._long_bodies = long_bodies

    async def run(self, work: Callable[..., T], *given: object) -> T:
        """Runs the work in a thread of those that tokenise."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    async def prepare(self, kind: Kind, body: RequestBody, tenant: str) -> PreparedRequest:
        """Raises `InputError`, which names the field, and `RequestError`."""
        if body.data is None:
            return await self._long_bodies.prepare(kind, body, tenant)
        parsed = self.preparer.parse(kind, body.data)
        has_text = not all(isinstance(prompt, TokenIds) for prompt in parsed.prompts)
        if not has_text or len(body.data) <= INLINE_BYTES:
            return self.preparer.tokenise(parsed)
        return await self.run(self.preparer.tokenise, parsed)
