"""OpenEnv: the client against a server of its protocol on loopback, and (`full`) against the package's own servers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.episode import run_episode
from skyrl_gym.error import InfraError, TaskError

pytest.importorskip("websockets", reason="needs websockets")
from http import HTTPStatus

from websockets.sync.server import ServerConnection, serve

from skyrl_gym.hubs.openenv import OpenEnv

from .scripted_server import unused_url

ASK = [{"role": "user", "content": "Count."}]
SCHEMA = {
    "title": "CountAction",
    "required": ["number"],
    "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
}


def play(connection: ServerConnection) -> None:
    """Serve one session: the next number earns 1, 13 breaks the environment, text is no number."""
    wanted = 0
    for text in connection:
        message = json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "reset":
            wanted = data.get("start", 0)
            answer = {"observation": {"wanted": wanted, "metadata": {}}, "reward": None, "done": False}
        elif not isinstance(data.get("number"), int):
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["number must be an integer"]}
            connection.send(json.dumps({"type": "error", "data": error}))
            continue
        elif data["number"] == 13:
            connection.send(json.dumps({"type": "error", "data": {"message": "lost", "code": "SESSION_ERROR"}}))
            continue
        else:
            reward = float(data["number"] == wanted)
            wanted += 1
            answer = {"observation": {"wanted": wanted}, "reward": reward, "done": wanted % 3 == 0}
        connection.send(json.dumps({"type": "observation", "data": answer}))


@pytest.fixture
def counting() -> Iterator[str]:
    """Address of a server with one place: a second session is told that it is full."""
    places = threading.Semaphore(1)

    def session(connection: ServerConnection) -> None:
        if not places.acquire(blocking=False):
            full = {"message": "full", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": full}))
            return
        try:
            play(connection)
        finally:
            places.release()

    def answer_http(connection: ServerConnection, request: Any) -> Any:
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps({"action": SCHEMA, "observation": {}}))
        return None

    with serve(session, "127.0.0.1", 0, process_request=answer_http) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def make(url: str, **columns: object) -> OpenEnv:
    settings = {"base_url": url, "timeout": 5.0}
    env = skyrl_gym.make("skyrl_gym.hubs.openenv:OpenEnv", env_config=settings, extras=columns)
    assert isinstance(env, OpenEnv)
    return env


def test_openenv_episode_sums_rewards_and_answers_refused_actions(counting: str) -> None:
    turns = iter(["I count: <action>0</action>", "two", '<action>{"number": "x"}</action>', "<action>1</action>"])
    env = make(counting, max_turns=8)
    result = run_episode(env, ASK, lambda _: next(turns, '<action>{"number": 2}</action>'))
    assert result.rewards == [1.0, 0.0, 0.0, 1.0, 1.0] and result.done and not result.truncated
    assert result.metrics == {"outcome_reward": 3.0, "turns": 5, "refused_actions": 2}
    opening, *replies = [message["content"] for message in result.messages if message["role"] == "user"]
    assert '"wanted": 0' in opening and '"number": {"type": "integer"}' in opening and "metadata" not in opening
    assert "no <action>...</action>" in replies[1] and "must be an integer" in replies[2]


def test_openenv_row_sets_reset_arguments_and_turn_limit(counting: str) -> None:
    result = run_episode(make(counting, reset='{"start": 7}', max_turns=1), ASK, lambda _: "<action>7</action>")
    assert (result.rewards, result.truncated) == ([1.0], True)


def test_openenv_server_failures_are_never_scored(counting: str) -> None:
    with make(counting) as env:
        env.init(ASK)
        with pytest.raises(InfraError, match=r"SESSION_ERROR.*lost"):
            env.step("<action>13</action>")
        other = OpenEnv({"base_url": counting, "timeout": 0.1})
        with pytest.raises(InfraError, match="max_concurrent_envs"):
            other.init(ASK)
        other.close()
    with pytest.raises(InfraError, match="ws://"):
        make(unused_url()).init(ASK)
    with pytest.raises(TaskError, match="base_url"):
        OpenEnv()


def test_openenv_key_is_not_sent_to_server_named_by_row() -> None:
    settings = {"base_url": "http://127.0.0.1:8000/a", "api_key": "secret"}
    assert OpenEnv(settings, {"base_url": "http://127.0.0.1:8000/b"}).base_url.endswith("/b")
    with pytest.raises(TaskError, match=r"http://127\.0\.0\.1:8000/a, .*'http://other:8000'"):
        OpenEnv(settings, {"base_url": "http://other:8000"})
    with pytest.raises(ValueError, match="api_key"):
        OpenEnv({"api_key": "secret"}, {"base_url": "http://other:8000"})


def test_openenv_server_without_tool_list_raises_infra_error(counting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMA, "title", "CallToolAction")
    with make(counting) as env, pytest.raises(InfraError, match="must be an integer"):
        env.init(ASK)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Address of a FastAPI application, served by a thread."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.mark.full
def test_openenv_package_serves_template_tool_and_skyrl_envs() -> None:
    pytest.importorskip("openenv", reason="needs openenv 0.10")
    from fastmcp import FastMCP
    from openenv.core import CallToolAction
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolObservation
    from openenv.core.env_server.types import Action, Observation, State

    from skyrl_gym.eval.rows import read_tasks
    from skyrl_gym.hubs.openenv.server import make_app

    class EchoAction(Action):
        message: str

    class EchoObservation(Observation):
        echoed: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed=None, episode_id=None, **kwargs):
            return EchoObservation(echoed="ready")

        def step(self, action, timeout_s=None, **kwargs):
            return EchoObservation(
                echoed=action.message, reward=0.1 * len(action.message), done=action.message == "bye"
            )

    with served(create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=4)) as url:
        turns = iter(["<action>hello</action>", "<action>bye</action>"])
        result = run_episode(make(url), ASK, lambda _: next(turns))
        assert result.rewards == pytest.approx([0.5, 0.3]) and result.done
        assert any(str(message["content"]).startswith("Observation:\nhello") for message in result.messages)

    class Shop(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def __init__(self):
            tools = FastMCP("shop")
            tools.tool(lambda item: {"tea": "3"}.get(item, "unknown"), name="price")
            super().__init__(tools)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation(metadata={"ask": "price of tea"})

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

    with served(create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=4)) as url:
        call = '<action>{"tool_name": "price", "arguments": {"item": "tea"}}</action>'
        result = run_episode(make(url, max_turns=2), ASK, lambda _: call)
        texts = [str(message["content"]) for message in result.messages if message["role"] == "user"]
        assert '"price"' in texts[0] and '"3"' in texts[1] and result.metrics["refused_actions"] == 0

    rows, _ = read_tasks("multiply", None)
    with served(make_app("multiply", rows, {}, 4)) as url:
        env = make(url, reset={"index": 0}, max_turns=3)
        result = run_episode(
            env, [{"role": "user", "content": "Play."}], lambda _: f"<action>{rows[0].oracle[0]}</action>"
        )
        assert result.total_reward == 1.0 and result.done and not result.truncated
