from __future__ import annotations

import asyncio

import pytest

from prfaas.errors import PeerError, TransferFailed
from prfaas.gateway.errands import Errands


async def fail(error: Exception) -> None:
    raise error


def test_what_goes_wrong_is_a_result_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            errands = Errands(tasks)
            good = errands.run(asyncio.sleep(0, "done"), 1.0)
            lost = errands.run(fail(TransferFailed("lost")), 1.0)
            late = errands.run(asyncio.Event().wait(), 0.0)
            ours = errands.run(fail(KeyError("a fault")), 1.0)
            assert len(errands) == 4
            await errands.end(10.0)
            assert good.result() == "done"
            assert isinstance(lost.result(), TransferFailed)
            assert "not done within" in str(late.result())
            assert isinstance(ours.result(), PeerError) and "a fault" in caplog.text
            assert not len(errands)

    asyncio.run(main())


def test_the_end_waits_and_then_cancels() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            errands = Errands(tasks)
            stuck = errands.run(asyncio.Event().wait(), 1000.0)
            await errands.end(0.0)
            await asyncio.wait([stuck])
            assert stuck.cancelled()

    asyncio.run(main())
