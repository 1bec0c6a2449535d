"""The runtime server: what a repeated, late, large or uninvited request does."""

import asyncio
import json
import select
import socket
import threading
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict

import httpx
import pytest

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes import Limits, RuntimeSpec, make_runtime, remote
from skyrl_agent.services import runtime as service

from .runtime_places import LIMITS, long_sleep, processes_with, serving, wait_until_true

pytestmark = pytest.mark.usefixtures("needs_local")
WISHES = {"limits": asdict(LIMITS)}


class Direct:
    """Requests as they are, to one runtime."""

    def __init__(self, url: str, **headers: str):
        self.url = f"{url}/runtimes/{uuid.uuid4().hex}"
        self.client = httpx.Client(timeout=60, trust_env=False, headers=headers)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ask("DELETE")
        self.client.close()

    def ask(self, method, path="", **body):
        return self.client.request(method, self.url + path, **body)

    def make(self, **wishes):
        return self.ask("PUT", "?wait=20", json=WISHES | wishes)

    def run(self, command, id="command-1", wait=20):
        return self.ask("PUT", f"/commands/{id}?wait={wait}", json={"command": command})


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["kind"]


def test_repeated_request_is_idempotent(server):
    with Direct(server) as runtime:
        first = runtime.make(setup=["echo made >>log"])
        assert first.json()["ready"] and runtime.make().json() == first.json()
        for _ in range(3):
            answer = runtime.run("echo run >>log; echo said", id="command-1")
            assert answer.json()["result"]["stdout"] == "said\n"
        assert runtime.ask("GET", "/files?path=log").content == b"made\nrun\n"


def test_running_command_is_reattached(server):
    with Direct(server) as runtime:
        runtime.make()
        command = "sleep 0.5; echo done"
        assert runtime.run(command, wait=0).json() == {"result": None}
        assert problem(runtime.run("true", id="command-2")) == (500, "infrastructure")  # one at a time
        assert runtime.run(command).json()["result"]["stdout"] == "done\n"
        assert runtime.ask("GET", "/commands/command-1").json()["result"]["stdout"] == "done\n"


def test_ended_command_is_not_started_by_late_request(server):
    with Direct(server) as runtime:
        runtime.make()
        assert runtime.ask("DELETE", "/commands/command-1").status_code == 204
        assert problem(runtime.run("echo run >log", id="command-1")) == (500, "infrastructure")
        assert problem(runtime.ask("GET", "/files?path=log")) == (404, "missing_file")
    with Direct(server) as runtime:  # nor a runtime made that was closed
        assert runtime.ask("DELETE").status_code == 204
        assert problem(runtime.make()) == (410, "gone")
        assert problem(runtime.run("true")) == (410, "gone")


def test_evicted_result_does_not_rerun_command(server):
    with Direct(server) as runtime:
        runtime.make()
        for number in range(10):
            runtime.run("echo run >>log", id=f"command-{number}")
        answer = runtime.run("echo run >>log", id="command-0")
        assert "expired" in answer.json()["message"]
        assert runtime.ask("GET", "/files?path=log").content == b"run\n" * 10


def test_missing_heartbeats_close_runtime_and_commands(server):
    sleep = long_sleep()
    with Direct(server) as runtime:
        runtime.make(lease_seconds=2.0)
        runtime.run(sleep, wait=0)
        assert wait_until_true(lambda: processes_with(sleep))
        assert wait_until_true(lambda: not processes_with(sleep))
        answer = runtime.ask("GET", "/commands/command-1")
        assert problem(answer) == (410, "gone")
        assert "no heartbeat of its owner for 2 s" in answer.json()["message"]


async def test_waiting_client_keeps_lease(server):
    async with make_runtime(RuntimeSpec(url=server, lease_seconds=2.0, limits=LIMITS)) as runtime:
        assert (await runtime.exec("sleep 3; echo on")).stdout == "on\n"
        await asyncio.sleep(3)
        assert (await runtime.exec("echo on")).stdout == "on\n"


@contextmanager
def forgetful_proxy(url: str, forget: int):
    """Passes requests on and drops the first answers: the server did what it was asked, and nobody heard."""
    server, dropped = httpx.URL(url), []

    def pass_on(client: socket.socket) -> None:
        with client, socket.create_connection((server.host, server.port)) as upstream:
            heard = b""
            while True:
                for source in select.select([client, upstream], [], [])[0]:
                    data = source.recv(1 << 16)
                    heard += data if source is client else b""
                    if not data or (source is upstream and b"/commands/" in heard and len(dropped) < forget):
                        dropped.extend([heard] if data else [])
                        return
                    (upstream if source is client else client).sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", dropped
        listener.shutdown(socket.SHUT_RDWR)


async def test_command_with_lost_reply_runs_once(server):
    with forgetful_proxy(server, forget=3) as (url, dropped):
        async with make_runtime(RuntimeSpec(url=url, limits=LIMITS)) as runtime:
            assert (await runtime.exec("echo run >>log; cat log")).stdout == "run\n"
            assert len(dropped) == 3


async def test_server_limits_number_of_runtimes(monkeypatch):
    with serving(max_runtimes=1) as url:
        first, second = (make_runtime(RuntimeSpec(url=url, limits=LIMITS)) for _ in range(2))
        await first.start()
        with Direct(url) as third:
            assert problem(third.make()) == (503, "full")
        assert httpx.get(f"{url}/health", trust_env=False).json()["runtimes"] == 1
        waiting = asyncio.create_task(second.start())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await first.close()
        await waiting
        monkeypatch.setattr(remote, "START_SECONDS", 0.5)
        with pytest.raises(InfraError, match="all 1 runtimes"):
            await make_runtime(RuntimeSpec(url=url)).start()
        await second.close()


async def test_large_requests_and_outputs_are_bounded(server):
    with serving(max_body_bytes=10_000, max_output_bytes=1000) as url:
        async with make_runtime(RuntimeSpec(url=url, limits=LIMITS)) as runtime:
            await runtime.write("a", b"x" * 10_000)
            with pytest.raises(InfraError, match="10000 bytes"):
                await runtime.write("b", b"x" * 10_001)
            result = await runtime.exec("cat a")
            assert (result.outcome, len(result.stdout)) == ("output", 1000)

        def pieces():
            yield from [b"x" * 5000] * 3

        with Direct(url) as runtime:
            runtime.make()
            assert problem(runtime.ask("PUT", "/files?path=c", content=pieces())) == (413, "request")


async def test_server_requires_token(server):
    with serving(token="schlüssel") as url:
        async with make_runtime(RuntimeSpec(url=url, token="schlüssel", limits=LIMITS)) as runtime:
            assert (await runtime.exec("echo in")).stdout == "in\n"
        for token in (None, "wrong", "schlussel"):
            with pytest.raises(InfraError, match="token is missing or wrong"):
                await make_runtime(RuntimeSpec(url=url, token=token)).start()
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 401


@pytest.mark.parametrize(
    "method, path, content",
    [
        ("PUT", "", b"no json"),
        ("PUT", "", json.dumps({"file": {}}).encode()),
        ("PUT", "", json.dumps({"lease_seconds": -1}).encode()),
        ("PUT", "?wait=1000", b"{}"),
        ("GET", "/files", b""),
    ],
)
def test_invalid_request_returns_reason(server, method, path, content):
    with Direct(server) as runtime:
        assert problem(runtime.ask(method, path, content=content)) == (400, "request")


def test_ids_are_validated_and_browser_requests_rejected(server):
    with Direct(server, Host="evil.example") as runtime:
        assert problem(runtime.make()) == (403, "unauthorized")
    with httpx.Client(base_url=server, trust_env=False) as client:
        assert problem(client.put("/runtimes/a.b", json={})) == (400, "request")


def test_token_is_required_for_public_address(monkeypatch, capsys):
    monkeypatch.delenv(service.TOKEN_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        service.main(["--host", "0.0.0.0", "--port", "0"])
    assert f"set {service.TOKEN_VARIABLE}" in capsys.readouterr().err


def test_port_in_use_raises_error(capsys):
    with service.listen("127.0.0.1", 0) as listener:
        listener.listen()
        assert service.main(["--port", str(listener.getsockname()[1])]) == 1
    assert "cannot listen on" in capsys.readouterr().err


async def test_unreachable_server_is_infrastructure_failure(monkeypatch):
    with service.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(remote, "START_SECONDS", 0.5)
    monkeypatch.setattr(remote, "CANCEL_SECONDS", 0.2)
    with pytest.raises(InfraError, match=f"127.0.0.1:{port}"):
        await make_runtime(RuntimeSpec(url=f"http://127.0.0.1:{port}")).start()


@pytest.mark.parametrize("spec", [RuntimeSpec(kind="remote"), RuntimeSpec(url="somewhere:80")])
def test_invalid_address_raises_config_error(spec):
    with pytest.raises(ConfigError, match=r"runtime\.url"):
        make_runtime(spec)


async def test_command_can_outlast_single_request(server, monkeypatch):
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.2)
    async with make_runtime(RuntimeSpec(url=server, limits=LIMITS)) as runtime:
        assert (await runtime.exec("sleep 1; echo done")).stdout == "done\n"
        limits = Limits(output_bytes=8 << 20)
        assert len((await runtime.exec("yes | head -c 4000000", limits=limits)).stdout) == 4_000_000
