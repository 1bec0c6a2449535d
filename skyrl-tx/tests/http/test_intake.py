"""Intake: bytes of bodies in memory together, and requests that are repeats."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from starlette.requests import Request

from tx.errors import Busy
from tx.tinker.http import bodies
from tx.tinker.http.bodies import SMALL_BYTES, Intake

JSON = {"content-type": "application/json"}
SAMPLE = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}


async def test_bodies_of_all_clients_share_limit(served):
    client = await served(max_bodies_mb=1)
    half_sent, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield b"x" * 700_000
        half_sent.set()
        await go_on.wait()
        yield b"x" * 100

    async def post(content, path: str = "forward_backward"):
        return await client.post(f"/api/v1/{path}", content=content, headers=JSON)

    slow = asyncio.create_task(post(slowly()))
    await asyncio.wait_for(half_sent.wait(), 20)
    refused = await post(b"x" * 400_000)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "requests of 700,000 bytes are being received" in refused.json()["detail"]
    assert "--max-bodies-mb" in refused.json()["detail"]
    small = await client.post("/api/v1/asample", json=SAMPLE)
    assert small.status_code == 200
    go_on.set()
    assert (await asyncio.wait_for(slow, 20)).status_code == 400
    assert (await post(b"x" * 400_000)).status_code == 400, "it is read, and no JSON"
    assert (await post(b"x" * 1_000_000)).status_code == 400, "all counts went down again"


class Stalled:
    """Request body that sends its first bytes, and the rest on permission."""

    def __init__(self, first: bytes):
        self.first, self.begun, self.may_go_on = first, asyncio.Event(), asyncio.Event()

    async def __call__(self) -> AsyncIterator[bytes]:
        yield self.first
        self.begun.set()
        await self.may_go_on.wait()


async def test_stalled_uploads_reserve_no_room(served):
    anna, bela = await served("anna", max_bodies_mb=16), await served("bela")
    session = (await bela.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
    stalled = [Stalled(b"{") for _ in range(16)]
    announced = JSON | {"content-length": str(1024 * 1024)}
    uploads = [
        asyncio.create_task(anna.post("/api/v1/forward_backward", content=each(), headers=announced))
        for each in stalled
    ]
    await asyncio.wait_for(asyncio.gather(*(each.begun.wait() for each in stalled)), 20)
    for client, status in ((bela, 200), (anna, 404)):  # the session is bela's
        beat = await client.post("/api/v1/session_heartbeat", json={"session_id": session})
        assert beat.status_code == status
    large = await bela.post("/api/v1/forward_backward", content=b"x" * 400_000, headers=JSON)
    assert large.status_code == 400, "it is read, and no JSON"
    for each in stalled:
        each.may_go_on.set()
    await asyncio.gather(*uploads, return_exceptions=True)


async def test_stalled_body_is_aborted(client, monkeypatch):
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.05)
    answer = await client.post("/api/v1/forward_backward", content=Stalled(b"{")(), headers=JSON)
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert "no data" in answer.json()["detail"]


async def test_refused_body_is_searched_off_event_loop(client, monkeypatch):
    threads, find_address = [], bodies.find_address

    def watched(*args):
        threads.append(threading.get_ident())
        return find_address(*args)

    monkeypatch.setattr(bodies, "find_address", watched)
    body = b'{"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": [' + b"[]," * 100_000 + b"[]]}}"
    answer = await client.post("/api/v1/forward_backward", content=body, headers=JSON)
    assert answer.status_code == 400 and "data[0]" in answer.json()["detail"]
    assert threads and threading.get_ident() not in threads


async def test_large_bodies_of_tenant_are_parsed_sequentially():
    intake = Intake(max_bytes=1, max_requests=100)
    begun, may_end = threading.Semaphore(0), threading.Event()

    def parse() -> str:
        begun.release()
        assert may_end.wait(20)
        return "parsed"

    def parsing(tenant: str, parse: Callable[[], str]) -> asyncio.Task[str]:
        request = Request({"type": "http", "tx.share": intake.begin(tenant, "/x")})
        return asyncio.create_task(bodies.run_in_thread_if_large(request, SMALL_BYTES, parse))

    annas = [parsing("anna", parse) for _ in range(3)]
    assert await asyncio.to_thread(begun.acquire, timeout=20)
    assert await asyncio.wait_for(parsing("bela", lambda: "bela's"), 20) == "bela's"
    assert not begun.acquire(blocking=False), "a second one of anna has begun"
    may_end.set()
    assert await asyncio.wait_for(asyncio.gather(*annas), 20) == ["parsed"] * 3


def held(intake: Intake, tenant: str, num_bytes: int) -> bool:
    try:
        intake.begin(tenant, "/x").hold(num_bytes)
    except Busy:
        return False
    return True


def test_tenant_may_hold_as_much_as_is_still_free():
    intake = Intake(max_bytes=64 * SMALL_BYTES, max_requests=1000)
    assert [held(intake, "anna", 16 * SMALL_BYTES) for _ in range(3)] == [True, True, False]
    assert held(intake, "bela", 16 * SMALL_BYTES), "half of it is free"
    assert not held(intake, "bela", 2 * SMALL_BYTES), "bela has as much as is free now"
    assert held(intake, "cleo", 8 * SMALL_BYTES)
    assert all(held(intake, tenant, SMALL_BYTES) for tenant in ("anna", "bela", "cleo") for _ in range(20))
    assert intake.refusals == {"anna": 1, "bela": 1}


def test_lone_body_is_admitted_whatever_size():
    intake = Intake(max_bytes=1, max_requests=1000)
    assert held(intake, "anna", 10**9)
    assert not held(intake, "bela", 10**6)


def test_requests_of_tenant_leave_room_for_other_tenants():
    intake = Intake(max_bytes=1, max_requests=100)
    assert sum(held(intake, "anna", 0) for _ in range(100)) == 75
    assert sum(held(intake, "bela", 0) for _ in range(100)) == 38, "half of 75"
    assert not held(intake, "anna", 0)
    intake.begin("anna", "/api/v1/session_heartbeat")


def test_ended_bodies_are_not_counted():
    intake = Intake(max_bytes=100, max_requests=4)
    for _ in range(10):
        share = intake.begin("anna", "/x")
        share.hold(60)
        share.hold(100)
        share.end()
    assert not intake.num_bytes and not intake.num_requests


@pytest.mark.parametrize("how", ["malformed", "stalled", "busy"])
async def test_refused_heartbeat_ends_no_session_of_tenant(served, service, monkeypatch, how: str):
    anna, bela = await served("anna"), await served("bela")
    made = [
        (await each.post("/api/v1/create_session", json={"tags": []})).json()["session_id"] for each in (anna, bela)
    ]
    for session in service.state.sessions.values():
        session.last_heartbeat = time.monotonic() - 1000
    assert {session.session_id for session in service.sessions.expired(300)} == set(made)
    refused = await REFUSED[how](anna, monkeypatch)
    assert refused.status_code == {"malformed": 422, "stalled": 408, "busy": 429}[how]
    assert [session.session_id for session in service.sessions.expired(300)] == made[1:]


async def _malformed(client: httpx.AsyncClient, _: pytest.MonkeyPatch) -> httpx.Response:
    return await client.post("/api/v1/session_heartbeat", json={})


async def _stalled(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> httpx.Response:
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.05)
    return await client.post("/api/v1/session_heartbeat", content=Stalled(b"{")(), headers=JSON)


async def _busy(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> httpx.Response:
    monkeypatch.setattr(bodies, "FULL", 0.0)
    monkeypatch.setattr(bodies, "CONTROL_PATHS", frozenset())
    return await client.post("/api/v1/session_heartbeat", json={})


REFUSED: dict[str, Callable[..., Awaitable[httpx.Response]]] = {
    "malformed": _malformed,
    "stalled": _stalled,
    "busy": _busy,
}


async def test_idempotency_key_deduplicates_samples(served):
    anna, bela = await served("anna"), await served("bela")

    async def ask(client, **headers: str) -> str:
        return (await client.post("/api/v1/asample", json=SAMPLE, headers=headers)).json()["request_id"]

    first = await ask(anna, **{"X-Idempotency-Key": "one"})
    assert await ask(anna, **{"X-Idempotency-Key": "one"}) == first
    others = {await ask(anna, **{"X-Idempotency-Key": "two"}), await ask(bela, **{"X-Idempotency-Key": "one"})}
    assert len({first, *others, await ask(anna), await ask(anna)}) == 5
