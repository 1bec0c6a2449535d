"""Connections on loopback to a web server without a service."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest
import uvicorn
from uvicorn.server import ServerState

from tx.tinker.file_limit import MOST, raise_file_limit
from tx.tinker.http.connections import MAX_HEAD_BYTES, Connections, compute_connection_limit

HALF = b"POST /x HTTP/1.1\r\nHost: x\r\nX-"
WHOLE = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
TIMEOUTS = 20.0
"""Seconds in which something must happen on the busiest of machines."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[..., Awaitable[Stream]]


class Application:
    """Answers `b"ok" * size` once it may."""

    def __init__(self) -> None:
        self.may_answer, self.num_begun, self.size = asyncio.Event(), 0, 1

    async def __call__(self, scope, receive, send) -> None:
        self.num_begun += 1
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok" * self.size, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def application() -> Application:
    return Application()


@pytest.fixture
async def serve(application: Application) -> AsyncIterator[Callable[..., Awaitable[Open]]]:
    """Listens with given connections; returns what opens one from the other side."""
    async with AsyncExitStack() as stack:

        async def begin(connections: Connections) -> Open:
            config = uvicorn.Config(application, log_config=None, lifespan="off", ws="none")
            config.load()
            protocol, state = connections.protocol(), ServerState()
            server = await asyncio.get_running_loop().create_server(
                lambda: protocol(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
                "127.0.0.1",
                0,
            )
            stack.callback(server.close)
            port = server.sockets[0].getsockname()[1]

            async def connect(data: bytes = b"") -> Stream:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
                stack.callback(writer.close)
                writer.write(data)
                return reader, writer

            return connect

        yield begin


async def is_cut(stream: Stream) -> bool:
    """Wait for the end of what the server says. Not there in time: False."""
    with suppress(ConnectionError):
        try:
            await asyncio.wait_for(stream[0].read(), TIMEOUTS)
        except TimeoutError:
            return False
    return True


async def answer(stream: Stream) -> bytes:
    return await asyncio.wait_for(stream[0].readuntil(b"0\r\n\r\n"), TIMEOUTS)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUTS):
        while not condition():
            await asyncio.sleep(0.01)


async def test_connections_without_complete_head_are_cut_but_not_served_ones(serve, application):
    connections = Connections(100, head_seconds=0.2)
    connect = await serve(connections)
    served = await connect(WHOLE)
    await wait_until(lambda: application.num_begun == 1)
    silent, half = await connect(), await connect(HALF)
    trickling = await connect(HALF)
    for _ in range(30):
        with suppress(ConnectionError):
            trickling[1].write(b"a")
        await asyncio.sleep(0.02)
    assert [await is_cut(each) for each in (silent, half, trickling)] == [True, True, True]
    assert (connections.num_open, connections.num_cut) == (1, 3)
    application.may_answer.set()
    assert (await answer(served)).startswith(b"HTTP/1.1 200")


async def test_half_sent_head_after_response_is_cut(serve, application):
    connections = Connections(100, head_seconds=0.2)
    connect = await serve(connections)
    application.may_answer.set()
    stream = await connect(WHOLE)
    await answer(stream)
    stream[1].write(WHOLE)
    await answer(stream)
    stream[1].write(HALF)
    assert await is_cut(stream)
    await wait_until(lambda: connections.num_open == 0)


async def test_endless_head_is_cut(serve):
    connections = Connections(100)
    connect = await serve(connections)
    stream = await connect(HALF)
    stream[1].write(b"a" * (MAX_HEAD_BYTES + 1))
    assert await is_cut(stream)
    assert connections.num_cut == 1


async def test_connection_limit_evicts_least_recently_used(serve, application):
    connections = Connections(3)
    connect = await serve(connections)
    served = await connect(WHOLE)
    await wait_until(lambda: application.num_begun == 1)
    first, second = await connect(HALF), await connect(HALF)
    await wait_until(lambda: connections.num_open == 3)
    late = await connect(WHOLE)
    await wait_until(lambda: application.num_begun == 2)
    assert await is_cut(first)
    assert (connections.num_open, connections.num_cut) == (3, 1)
    application.may_answer.set()
    for stream in (served, late):
        assert b"200 OK" in await answer(stream)
    await connect(HALF)
    assert await is_cut(second), "it has waited longer than the two that were answered"


async def test_connection_with_unread_response_is_cut(serve, application):
    connections = Connections(100, unread_seconds=0.2)
    connect = await serve(connections)
    application.may_answer.set()
    application.size = 30_000_000  # more than the kernel keeps
    stream = await connect(WHOLE)
    stream[1].transport.pause_reading()
    await wait_until(lambda: connections.num_cut == 1)


@pytest.mark.parametrize("files, expected", [(100, 50), (1024, 768), (20_000, 19_744)])
def test_some_files_are_kept_for_other_things_than_connections(files: int, expected: int):
    assert compute_connection_limit(files) == expected


def test_open_file_limit_is_raised_to_system_maximum():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, allowed), hard))
        assert raise_file_limit() == allowed == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raise_file_limit() == allowed, "once more changes nothing"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
