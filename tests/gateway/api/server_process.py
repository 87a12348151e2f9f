"""The API server as a separate process, whose memory tests can measure."""

from __future__ import annotations

import asyncio
import resource
import sys

from prfaas.engine.emulated.pace import Scales
from tests.gateway.api.api_server import api_server


async def main(body_mb: float, patience_s: float, descriptors: int) -> None:
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    limits = {
        "max_body_mb": body_mb,
        "max_bodies_mb": 4 * body_mb,
        "timeouts": {"body_s": patience_s},
    }
    # Open to registrations: tests send bad heartbeats, too.
    async with api_server(
        scales=Scales(time=1e-6), timeout_s=None, any_member=True, **limits
    ) as server:
        print(f"serving at {server.url}", flush=True)  # noqa: T201
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


# This is a process's entry point.
asyncio.run(main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
