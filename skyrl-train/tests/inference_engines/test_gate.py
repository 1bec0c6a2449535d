"""Gate: requests that may start, and the wait of the others."""

import asyncio

from skyrl_train.inference_engines.gate import Gate


async def test_gate_opens_when_last_reason_is_removed() -> None:
    gate = Gate()
    assert await gate.wait()
    gate.close("paused")
    gate.close("updating")
    waiting = asyncio.ensure_future(gate.wait())
    await asyncio.sleep(0)
    gate.open("paused")
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.open("updating")
    assert await waiting is True


async def test_dismissing_waiters_keeps_gate_closed() -> None:
    gate = Gate()
    gate.close("asleep")
    waiting = asyncio.ensure_future(gate.wait())
    await asyncio.sleep(0)
    gate.dismiss()
    assert await waiting is False
    assert not gate.is_open


async def test_gate_closed_immediately_after_opening_blocks_waiters() -> None:
    gate = Gate()
    gate.close("paused")
    waiting = asyncio.ensure_future(gate.wait())
    await asyncio.sleep(0)
    gate.open("paused")
    gate.close("paused")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    gate.open("paused")
    assert await waiting is True
