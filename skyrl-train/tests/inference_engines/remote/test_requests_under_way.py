"""Who waits on this side of a server, and until when."""

import asyncio

from skyrl_train.inference_engines.remote.requests_under_way import PauseGate, RunningRequests


async def test_a_closed_gate_holds_requests_until_it_opens_or_they_are_aborted() -> None:
    gate = PauseGate()
    assert await gate.enter()
    gate.close()
    first = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.abort()
    assert await first is False
    second = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.open()
    assert await second is True


async def test_a_gate_that_closes_again_at_once_lets_nobody_through() -> None:
    gate = PauseGate()
    gate.close()
    waiting = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    gate.open()
    gate.close()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    gate.open()
    assert await waiting is True


async def test_requests_are_counted_by_adapter() -> None:
    running = RunningRequests()
    with running.one_more(None), running.one_more("policy"):
        assert len(running) == 2
        idle = asyncio.ensure_future(running.until_none("policy"))
        all_idle = asyncio.ensure_future(running.until_none(of_any=True))
        await asyncio.sleep(0)
        assert not idle.done()
    await asyncio.wait_for(asyncio.gather(idle, all_idle), 1)
    assert len(running) == 0
