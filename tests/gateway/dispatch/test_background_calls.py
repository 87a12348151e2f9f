from __future__ import annotations

import asyncio

import pytest

from prfaas.errors import PeerError, TransferFailed
from prfaas.gateway.dispatch.background_calls import BackgroundCalls

LONG_S = 1000.0


async def fail(error: Exception) -> None:
    raise error


async def test_an_error_is_a_result_and_harms_no_other_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with BackgroundCalls(LONG_S) as calls:
        good = calls.run(asyncio.sleep(0, "done"), LONG_S)
        lost = calls.run(fail(TransferFailed("lost")), LONG_S)
        late = calls.run(asyncio.Event().wait(), 0.0)
        ours = calls.run(fail(KeyError("a fault")), LONG_S)
        assert len(calls) == 4
        await asyncio.wait([good, lost, late, ours])
        assert good.result() == "done"
        assert isinstance(lost.result(), TransferFailed)
        assert "not finished within" in str(late.result())
        assert isinstance(ours.result(), PeerError) and "a fault" in caplog.text
        assert not len(calls)


async def test_the_end_cancels_what_need_not_finish_and_waits_for_the_rest() -> None:
    """Also for a call that another one starts when it is over."""
    ended: list[str] = []

    let_go = asyncio.Event()

    async def call(name: str) -> None:
        await let_go.wait()
        ended.append(name)

    async with BackgroundCalls(LONG_S) as calls:
        optional = calls.run(call("optional"), LONG_S)
        first = calls.run(call("open"), LONG_S, must_finish=True)
        first.add_done_callback(lambda _: calls.run(call("abort"), LONG_S, must_finish=True))
        ending = asyncio.create_task(calls.end())
        await asyncio.wait([optional])
        assert optional.cancelled() and not ending.done()
        assert isinstance(await calls.run(call("too late"), LONG_S), PeerError)
        let_go.set()
        await ending
    assert ended == ["open", "abort"]


async def test_the_wait_is_bounded_and_what_comes_after_it_is_closed() -> None:
    calls = BackgroundCalls(0.0)
    stuck = calls.run(asyncio.Event().wait(), LONG_S, must_finish=True)
    await calls.end()
    assert stuck.cancelled() and not len(calls)
    call = asyncio.sleep(0)
    late = calls.run(call, LONG_S, must_finish=True)
    assert "shutting down" in str(await late)
    assert call.cr_frame is None, "closed: Python does not warn that it was never awaited"
