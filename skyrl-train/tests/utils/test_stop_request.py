"""Requests to end a run, from a signal and from within the run."""

import asyncio
import os
import signal

import pytest

from skyrl_train.utils.stop_request import StopRequest


def test_run_ends_with_given_reason():
    request = StopRequest()
    request.make(ValueError("no gradient"))
    assert request.is_made
    with pytest.raises(ValueError, match="no gradient"):
        request.end()


def test_signal_ends_requested_stop_at_once():
    async def wait_for_checkpoint() -> None:
        request = StopRequest()
        request.accept(timeout_seconds=60)
        request.make(ValueError("no gradient"))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(wait_for_checkpoint())


def test_earlier_signal_decides_how_run_ends():
    async def stop() -> None:
        request = StopRequest()
        request.accept(timeout_seconds=60)
        os.kill(os.getpid(), signal.SIGTERM)
        await request.wait()
        request.make(ValueError("no gradient"))
        request.end()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stop())
