"""One verifiers environment that is served in this process: its tasks, its shared tool servers, its episodes.

An environment of verifiers drives its own episode: a harness asks an OpenAI-compatible endpoint for each turn. Here
that endpoint is a server on loopback, on the event loop of a thread, and each request waits until the trainer has the
text of the turn. So any environment runs unmodified, with its harness, tools, limits and rewards.
"""

import asyncio
import atexit
import functools
import json
import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from skyrl_gym.error import Error, InfraError, TaskError
from skyrl_gym.waits import waiting

HARNESS = "skyrl_gym_verifiers"
START_SECONDS = 300.0
"""Maximum startup time of an environment, including its shared tool servers."""
CLOSE_SECONDS = 10.0
MODEL = "policy"

Body = dict[str, Any]
"""A chat-completions request, or a message, as JSON."""


def library() -> Any:
    """Return `verifiers.v1`. Raises Error if it is not installed, or is of a release without it."""
    try:
        import verifiers.v1  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise Error(
            f"verifiers 0.4 is needed ({missing}): pip install verifiers==0.4.0; earlier releases have another "
            "interface, which is not supported"
        ) from missing
    return verifiers.v1


def environment_of(value: object) -> Body:
    """Return verifiers' settings of an environment (the `[env]` block of `vf-eval`), from a mapping, its JSON text, or
    the id of a taskset. Raises TaskError.
    """
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return {"taskset": {"id": value}}
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as mistake:
        raise TaskError(f"environment must be a mapping, its JSON text, or a taskset's id: {mistake}") from None
    if not isinstance(given, Mapping) or not isinstance(given.get("taskset"), Mapping):
        raise TaskError(
            f'environment must contain a taskset, as in {{"taskset": {{"id": "gsm8k"}}}}; got {value!r:.200}'
        )
    return dict(given)


def load(environment: Body) -> Any:
    """Load the `verifiers.v1.Env`. A role without a harness or runtime runs in this process.

    The defaults of verifiers are a harness that runs shell commands and a runtime in a cloud.

    Raises:
        Error: the taskset is unknown, or its settings are invalid.
    """
    vf = library()
    from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    try:
        config = loaders.resolve_env_config(dict(environment))
        has_harness = loaders.default_harness_id(config.taskset.id) != "bash"
        for role, agent in agent_config_fields(config).items():
            if agent.harness is None and not has_harness:
                agent.harness = loaders.harness_config_type(HARNESS)(id=HARNESS)
            if "runtime" not in (environment.get(role) or {}):
                agent.runtime = vf.SubprocessConfig()
        return loaders.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as refusal:
        raise Error(f"verifiers environment {json.dumps(environment)} cannot be created: {refusal}") from refusal


class Conversation:
    """Turns of one episode, between verifiers' event loop and the thread of the trainer."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        """Requests (dicts) in order; then the finished `Episode`, or the exception that ended it."""
        self.episode: Future[None] | None = None
        self._reply: asyncio.Future[Body] | None = None

    async def ask(self, body: Body) -> Body:
        """Hand a request over and wait for the assistant message."""
        if self._reply is not None:
            raise Error(
                "two agents of the environment use the policy concurrently; configure another client for one of them"
            )
        self._reply = asyncio.get_running_loop().create_future()
        try:
            self.events.put(body)
            return await self._reply
        finally:
            self._reply = None

    def answer(self, message: Body) -> None:
        """Answer the pending request. To be called on the event loop."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(message)


class Host:
    """A loaded environment, its event loop and its endpoint. Use `host_of`, which shares them."""

    def __init__(self, environment: Body) -> None:
        self.env = load(environment)
        self._source: Iterator[Any] = iter(self.env.taskset)
        self._tasks: list[Any] = []
        self._reading = threading.Lock()
        self._conversations: dict[str, Conversation] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._url = ""
        threading.Thread(target=self._loop.run_forever, name="skyrl-gym-verifiers", daemon=True).start()
        started: Future[None] = Future()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(started), self._loop)
        self._serving.add_done_callback(functools.partial(_set_failure, started))
        try:
            started.result(START_SECONDS)
        except Exception as failure:  # whatever an environment's own start raises
            raise InfraError(f"verifiers environment {json.dumps(environment)} did not start: {failure!r}") from failure
        atexit.register(self.close)

    def task(self, index: int) -> Any:
        """Return a task by its position. Raises TaskError if there are fewer."""
        with self._reading:
            while len(self._tasks) <= index:
                task = next(self._source, None)
                if task is None:
                    raise TaskError(f"index must be below {len(self._tasks)}, the number of tasks; got {index}")
                self._tasks.append(task)
            return self._tasks[index]

    def start(self, index: int) -> Conversation:
        """Begin an episode; its first event is the prompt."""
        conversation = Conversation()
        play = self._play(self.task(index), conversation)
        conversation.episode = asyncio.run_coroutine_threadsafe(play, self._loop)
        return conversation

    def answer(self, conversation: Conversation, message: Body) -> None:
        self._loop.call_soon_threadsafe(conversation.answer, message)

    def next_event(self, conversation: Conversation, seconds: float) -> Any:
        """Wait for a request, or for the finished episode. Raises what ended the episode, and InfraError."""
        try:
            with waiting("the next turn", on="the verifiers environment", deadline=seconds):
                event = conversation.events.get(timeout=seconds)
        except queue.Empty:
            raise InfraError(f"the verifiers environment returned no turn within step_seconds = {seconds:g}") from None
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        """End episodes and tool servers. May be called more than once."""
        if not self._serving.done():
            self._loop.call_soon_threadsafe(self._closing.set)
            _wait_for_future(self._serving, CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self, started: "Future[None]") -> None:
        from aiohttp import web  # pyright: ignore[reportMissingImports]

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            async with self.env.serving():
                started.set_result(None)
                await self._closing.wait()
        finally:
            await runner.cleanup()

    async def _play(self, task: Any, conversation: Conversation) -> None:
        vf = library()
        client = vf.EvalClientConfig(base_url=self._url, api_key_var="SKYRL_GYM_VERIFIERS_KEY")
        traces: list[str] = []

        def minted(trace: Any) -> None:
            traces.append(trace.id)
            self._conversations[trace.id] = conversation

        try:
            event = await self.env.run_episode(task, vf.ModelContext(model=MODEL, client=client), on_trace=minted)
        except Exception as failure:  # carried to the thread that steps
            event = failure
        finally:
            for trace in traces:
                self._conversations.pop(trace, None)
        conversation.events.put(event)

    async def _complete(self, request: Any) -> Any:
        """Answer a chat-completions request, as JSON or as a stream of one event."""
        from aiohttp import web  # pyright: ignore[reportMissingImports]
        from verifiers.v1.clients.client import SESSION_ID_HEADER  # pyright: ignore[reportMissingImports]

        trace = request.headers.get(SESSION_ID_HEADER, "")
        conversation = self._conversations.get(trace)
        if conversation is None:
            return web.json_response({"error": {"message": f"no episode has the trace {trace!r}"}}, status=404)
        body = await request.json()
        try:
            message = await conversation.ask(body | {"trace": trace})
        except Error as refusal:
            conversation.events.put(refusal)
            return web.json_response({"error": {"message": str(refusal)}}, status=400)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        kind = "delta" if body.get("stream") else "message"
        if body.get("stream"):
            calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls", []))]
            message = message | ({"tool_calls": calls} if calls else {})
        answer = {
            "id": f"chatcmpl-{trace}",
            "object": "chat.completion.chunk" if body.get("stream") else "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, kind: message, "finish_reason": reason}],
        }
        if not body.get("stream"):
            return web.json_response(answer)
        return web.Response(text=f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


def _set_failure(started: "Future[None]", serving: "Future[None]") -> None:
    if not started.done():
        failure = None if serving.cancelled() else serving.exception()
        started.set_exception(failure or InfraError("it exited before it was ready"))


def _wait_for_future(future: "Future[None]", seconds: float) -> bool:
    """Wait for a future; return whether it is done."""
    try:
        future.exception(seconds)
    except TimeoutError:
        return False
    return True


_hosts: dict[str, Host] = {}
_hosts_lock = threading.Lock()


def host_of(environment: Body) -> Host:
    """Return the host of these settings, one a process. Raises Error, InfraError."""
    key = json.dumps(environment, sort_keys=True)
    with _hosts_lock:
        if key not in _hosts:
            _hosts[key] = Host(environment)
        return _hosts[key]
