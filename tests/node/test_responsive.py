"""A node that reads, hashes or computes a long prompt still answers its gateway's polls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prfaas.engine.emulated.pace import Scales
from tests.engine.emulated.builders import emulated
from tests.node.local_api import BYTES, LocalApi, local_api
from tests.waiting import HANG_S

TOKENS = 131_072
# CPU time of the loop's thread in one callback. A gateway takes a node for silent after 1.5 s; the
# longest callback here takes about 20 ms.
MOST_CPU_S = 0.2


@contextmanager
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The CPU seconds of the longest callback of the event loop. A busy machine does not change
    it, unlike the time that passes."""
    longest = [0.0]
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began_s)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.events.Handle, "_run", timed)
        yield longest


async def polls_until(node: LocalApi, answering: asyncio.Task[Any]) -> int:
    """Polls that were answered before the request was."""
    answered = 0
    while not answering.done():
        for path in ("/health", "/metrics"):
            async with node.http.get(path) as response:
                assert response.status == 200
        answered += 1
    return answered


@pytest.mark.parametrize("kind", ["ids", "text", "chat"])
async def test_a_long_prompt_does_not_hold_the_loop(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = emulated(max_tokens=2 * TOKENS, vocab_size=512, scales=Scales(time=3e-6))
    path, body = "/v1/completions", b""
    if kind == "ids":
        body = b'{"max_tokens": 1, "prompt": [%b]}' % b",".join([b"97"] * TOKENS)
    elif kind == "text":
        body = b'{"max_tokens": 1, "prompt": "%b"}' % (b"a" * TOKENS)
    else:
        path = "/v1/chat/completions"
        message = b'{"role": "user", "content": "%b"}' % (b"a" * (TOKENS // 64))
        body = b'{"max_tokens": 1, "messages": [%b]}' % b",".join([message] * 64)
    async with asyncio.timeout(HANG_S), local_api(engine, BYTES) as node:

        async def ask() -> int:
            async with node.http.post(path, data=body) as response:
                usage: dict[str, int] = (await response.json())["usage"]
                return usage["prompt_tokens"]

        with longest_callback(monkeypatch) as longest:
            answering = asyncio.create_task(ask())
            polled = await polls_until(node, answering)
        assert await answering >= TOKENS
        assert polled >= 1, "a poll was answered while the prompt was computed"
        assert longest[0] < MOST_CPU_S
