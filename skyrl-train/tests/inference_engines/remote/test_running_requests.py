"""Registry of the requests that run at a server."""

import asyncio

from skyrl_train.inference_engines.remote.running_requests import RunningRequests


async def test_requests_are_counted_by_adapter() -> None:
    running = RunningRequests()
    with running.count_request(None), running.count_request("policy"):
        assert len(running) == 2
        idle = asyncio.ensure_future(running.wait_until_idle("policy"))
        all_idle = asyncio.ensure_future(running.wait_until_idle(of_any=True))
        await asyncio.sleep(0)
        assert not idle.done()
    await asyncio.wait_for(asyncio.gather(idle, all_idle), 1)
    assert len(running) == 0
