"""Asking a server that misbehaves as servers do."""

import asyncio
import time

import pytest

from skyrl_agent.errors import InfraError
from skyrl_gym.concurrency import gather_or_cancel
from skyrl_gym.services import AsyncService, RefusedRequest, Retries

from .agent_web_server import unused_url, web_server

AT_ONCE = Retries(attempts=3, first_wait=0.01, longest_wait=0.05)


def answers(*script):
    """The next of a script, and from then on the last."""
    left = list(script)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


async def ask(url: str, **options):
    service = AsyncService(url, retries=AT_ONCE, **options)
    try:
        return await service.json({"q": 1})
    finally:
        await service.close()


@pytest.mark.parametrize("trouble", [(500, "no"), (503, "busy", {"Retry-After": "0"}), (429, "slow"), "drop"])
async def test_transient_failures_are_retried(trouble):
    with web_server(answers(trouble, (200, {"a": 2}))) as server:
        assert await ask(server.url) == {"a": 2}
    assert [asked.body for asked in server.asked] == [{"q": 1}] * 2


@pytest.mark.parametrize(
    "script, error, text",
    [
        ([(500, "it broke")], InfraError, "failed 3 times .* HTTP 500: it broke"),
        ([(403, "no such key")], InfraError, "rejected the request: HTTP 403: no such key"),
        ([(200, "<html>")], InfraError, "not JSON"),
        ([(422, "topk is too large")], RefusedRequest, "topk is too large"),
    ],
)
async def test_faults_are_classified_by_cause(script, error, text):
    with web_server(answers(*script)) as server, pytest.raises(error, match=text):
        await ask(server.url)


@pytest.mark.parametrize("trouble", ["hang", "trickle"])
async def test_unfinished_server_response_times_out(trouble):
    started = time.monotonic()
    with web_server(answers(trouble)) as server, pytest.raises(InfraError, match=r"0\.2 s"):
        await ask(server.url, timeout=0.2)
    assert time.monotonic() - started < 10
    assert len(server.asked) == 3


async def test_unreachable_server_is_infrastructure_failure():
    with pytest.raises(InfraError, match="failed 3 times"):
        await ask(unused_url())


async def test_failure_cancels_concurrent_requests():
    others = asyncio.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            others.set()

    async def fails():
        await asyncio.sleep(0)
        raise InfraError("gone")

    with pytest.raises(InfraError, match="gone"):
        await gather_or_cancel([waits(), fails()])
    assert others.is_set()
