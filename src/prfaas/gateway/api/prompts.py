"""From a request's body to its token ids. A short body is parsed on the event loop and tokenised in
a thread; a long one is given to a worker process, because parsing holds the interpreter lock: also
in a thread it would stop every stream. Tenants take turns at both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from prfaas.gateway.api.body_limits import RequestBody
from prfaas.gateway.api.request_preparation import PreparedRequest, RequestPreparer
from prfaas.gateway.api.request_schema import Kind
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.turns import Turns

# Rendering and tokenising this much takes well under a millisecond: less than a thread switch.
INLINE_BYTES = 1024
THREADS = 2  # the tokenizer releases the interpreter lock
# Most texts take milliseconds: a burst of requests of one tenant is served, and not refused.
QUEUED_PER_TENANT = 1024
T = TypeVar("T")


class LongBodies(Protocol):
    async def prepare(
        self, kind: Kind, body: RequestBody, tenant: str, count_read: Callable[[int], None]
    ) -> PreparedRequest:
        """Prepares a request whose body is in a file. Calls `count_read` with the number of bytes
        that were read, decompressed, also when it refuses the request. Raises `InputError` and
        `RequestError`."""


class Prompts:
    def __init__(
        self,
        preparer: RequestPreparer,
        threads: ThreadPoolExecutor,
        turns: Turns[int],
        long_bodies: LongBodies,
    ) -> None:
        """`turns` are those of the threads, which have no names."""
        self.preparer = preparer
        self._threads = threads
        self._turns = turns
        self._long_bodies = long_bodies

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Runs the work in a thread of those that tokenise. Raises `RequestError` when there is too
        much of the tenant's work."""

        cpu_s = 0.0

        def measured() -> T:
            nonlocal cpu_s
            began_s = time.thread_time()
            try:
                return work()
            finally:
                cpu_s = time.thread_time() - began_s

        async def in_thread(thread: int) -> T:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, measured)
            finally:
                self._turns.measured(thread, cpu_s)

        return await self._turns.run(tenant, in_thread)

    async def prepare(
        self, kind: Kind, body: RequestBody, tenant: str, count_read: Callable[[int], None]
    ) -> PreparedRequest:
        """`count_read` is called with the size of a long body, decompressed. Raises `InputError`,
        which names the field, and `RequestError`."""
        if body.data is None:
            return await self._long_bodies.prepare(kind, body, tenant, count_read)
        parsed = self.preparer.parse(kind, body.data)
        has_text = not all(isinstance(prompt, TokenIds) for prompt in parsed.prompts)
        if not has_text or len(body.data) <= INLINE_BYTES:
            return self.preparer.tokenise(parsed)
        return await self.run(tenant, partial(self.preparer.tokenise, parsed))
