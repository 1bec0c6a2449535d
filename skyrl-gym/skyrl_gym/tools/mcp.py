"""The tools of an MCP server (https://modelcontextprotocol.io) as a tool group. Needs the `mcp` package.

The server is a process that is started here and talks over its standard input and output, or one that is reached over
HTTP. Its connection lives in one task of an event loop in a thread; any number of threads may call its tools.
"""

import asyncio
import atexit
import functools
import json
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TextIO

from skyrl_gym.call_arguments import SOLE_ARGUMENT, Schema, parse_text
from skyrl_gym.deadline import outcome_of
from skyrl_gym.error import InfraError
from skyrl_gym.tools.background_loop import BackgroundLoop
from skyrl_gym.tools.core import ToolGroup, function_schema, unknown_tool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

PROBE_SECONDS = 5.0
"""Time that a server has to show that it is alive, after a call that it did not answer."""
CLOSE_SECONDS = 15.0
"""Time that a server has to exit: it gets a shutdown request, then a signal, then is killed."""
MAX_PAGES = 100
MAX_STDERR = 2000

_BAD_IN_NAME = re.compile(r"[^A-Za-z0-9_-]")


class MCPToolGroup(ToolGroup):
    """Tools of one MCP server, listed once at construction. One group may serve many environments.

    A crashed server is restarted by the next call, up to `max_restarts` crashes without a response in between. Its
    memory is lost, so the call during the crash raises InfraError.

    Args:
        command: Command of a server over standard input and output.
        url: Address of a server over streamable HTTP. Exactly one of the two is required.
        env: Environment variables for the command, in addition to a few that every program needs.
        headers: HTTP headers, such as for authorization.
        timeout: Seconds for one call.
        start_timeout: Seconds for the server to start and list its tools.
        prefix: Prefix of every tool's name, if names would clash with other groups.
        name: Name of the group; default: made from the command or URL.

    Raises:
        InfraError: the server cannot be started or reached. The text ends with its standard error.
        ValueError: not exactly one of `command` and `url`; two tools get the same name.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        start_timeout: float = 60.0,
        max_restarts: int = 3,
        prefix: str = "",
        name: str | None = None,
    ):
        if bool(command) == bool(url):
            raise ValueError(f"MCPToolGroup needs either command or url; got command={command!r}, url={url!r}")
        super().__init__(name=name or f"MCPToolGroup({url or ' '.join(command or ())})")
        self.timeout = timeout
        self._server = _ServerHandle(command, url, env, headers, start_timeout, max_restarts)
        try:
            self._tools = self._named(self._server.tools(), prefix)
        except BaseException:  # a KeyboardInterrupt too: the server is a process that nothing else would end
            self._server.close()
            raise
        self._tool_registry = {tool: functools.partial(self._run, tool) for tool in self._tools}

    def _named(self, listed: "list[Tool]", prefix: str) -> "dict[str, Tool]":
        """Return tools by the name that models use, which allows fewer kinds of characters than MCP's."""
        tools: dict[str, Tool] = {}
        for tool in sorted(listed, key=lambda tool: tool.name):
            shown = _BAD_IN_NAME.sub("_", prefix + tool.name)
            if shown in tools:
                raise ValueError(
                    f"{self.name}: tools {tools[shown].name!r} and {tool.name!r} have the same name {shown!r}"
                )
            tools[shown] = tool
        return tools

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool as `ToolGroup.call` does, but leave the check of the arguments to the server."""
        if name not in self._tools:
            return unknown_tool(name, self.get_tool_names())
        if not isinstance(arguments, Mapping):
            return f"Error calling {name}: the arguments must be an object with a value for each name"
        return self._run(name, **{str(key): value for key, value in arguments.items()})

    def schemas(self) -> list[Schema]:
        return [function_schema(name, tool.description or "", tool.input_schema) for name, tool in self._tools.items()]

    def close(self) -> None:
        """End the server, if it was started here, and the thread. May be called more than once."""
        self._server.close()

    def _run(self, tool_name: str, /, *args: object, **arguments: object) -> str:
        tool = self._tools[tool_name]
        properties: dict[str, object] = tool.input_schema.get("properties", {})
        if SOLE_ARGUMENT in arguments:
            args = (*args, arguments.pop(SOLE_ARGUMENT))
        arguments |= zip(properties, args, strict=False)
        arguments = {name: _to_typed(value, properties.get(name)) for name, value in arguments.items()}
        answer = self._server.call(tool.name, arguments, self.timeout)
        return answer if isinstance(answer, str) else _format_result(tool_name, answer)


def _to_typed(value: object, schema: object) -> object:
    """Text for something that cannot be text is read as JSON: some call formats know nothing else."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(value, str) or kind is None or "string" in kind:
        return value
    parsed = parse_text(value)
    return value if parsed is None else parsed


def _format_result(tool_name: str, result: "CallToolResult") -> str:
    text = "\n".join(_format_block(block) for block in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return f"Error in {tool_name}: {text}" if result.is_error else text


def _format_block(block: Any) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
        case "resource":
            text = getattr(block.resource, "text", None)
            return f"[resource: {block.resource.uri}]" if text is None else text
        case "resource_link":
            return f"[resource: {block.uri}]"
        case other:
            return f"[{other}]"


class _ServerHandle:
    """Owner of at most one connection, which it starts and restarts. Belongs to the process that made it."""

    def __init__(
        self,
        command: Sequence[str] | None,
        url: str | None,
        env: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        start_timeout: float,
        max_restarts: int,
    ):
        self._label = url or " ".join(command or ())
        self._connect = functools.partial(_Connection, self._label, command, url, env, headers)
        self._start_timeout = start_timeout
        self._max_restarts = max_restarts
        self._deaths = 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = BackgroundLoop("mcp")
        self._connection: _Connection | None = None
        _open_servers.add(self)

    def tools(self) -> "list[Tool]":
        connection = self._living()
        # Failures of transport or protocol are of many classes, and have no base class.
        listed = outcome_of(self._loop.run, connection.list_tools(), self._start_timeout)
        if isinstance(listed, Exception):
            raise self._lost(connection, listed) from listed
        return listed

    def call(self, tool: str, arguments: dict[str, object], timeout: float) -> "CallToolResult | str":
        """Return the result, or text for the model if the server answers, but not to this."""
        from mcp import MCPError

        connection = self._living()
        result = outcome_of(self._loop.run, connection.call_tool(tool, arguments), timeout)
        if isinstance(result, TimeoutError | MCPError) and self._answers(connection):
            answer = f"no answer within {timeout:g} seconds" if isinstance(result, TimeoutError) else str(result)
            return f"Error in {tool}: {answer}"
        if isinstance(result, Exception):
            raise self._lost(connection, result) from result
        self._deaths = 0
        return result

    def close(self) -> None:
        if self._process != os.getpid():  # a forked child has the object, but neither the thread nor the server
            return
        with self._lock:
            self._closed = True
            # Closed under the lock: a connection that a call starts meanwhile would leave its server running.
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            self._loop.close()
            _open_servers.discard(self)

    def _living(self) -> "_Connection":
        if self._process != os.getpid():
            raise InfraError(f"MCP server {self._label}: create the group in the process that uses it")
        with self._lock:
            if self._closed:
                raise InfraError(f"MCP server {self._label}: the group is closed")
            if self._connection is None:
                # Deaths in a row: an answer sets the count back to 0.
                if self._deaths > self._max_restarts:
                    raise InfraError(f"MCP server {self._label} crashed {self._deaths} times in a row: not restarted")
                connection = self._connect(self._loop)
                try:
                    connection.start(self._start_timeout)
                except InfraError:
                    self._deaths += 1
                    raise
                self._connection = connection
            return self._connection

    def _answers(self, connection: "_Connection") -> bool:
        """Return whether the server responds at all: one error code means that it is gone, or anything else."""
        return not isinstance(outcome_of(self._loop.run, connection.list_tools(), PROBE_SECONDS), Exception)

    def _lost(self, connection: "_Connection", failure: BaseException) -> InfraError:
        with self._lock:
            if self._connection is connection:  # else another thread has found out before
                self._connection = None
                self._deaths += 1
                connection.close()
        return InfraError(f"MCP server {self._label} does not work: {_unwrap_cause(failure)}{connection.stderr()}")


_open_servers: "weakref.WeakSet[_ServerHandle]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for server in list(_open_servers):
        server.close()


class _Connection:
    """One connection to a server. The same task must open and close it, so a dedicated task holds it open."""

    def __init__(
        self,
        label: str,
        command: Sequence[str] | None,
        url: str | None,
        env: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        loop: BackgroundLoop,
    ):
        self._label, self._command, self._url = label, command, url
        self._env, self._headers = dict(env or {}), dict(headers or {})
        self._loop = loop
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        # Futures of `concurrent.futures`: other threads wait for them while the loop runs in its own.
        self._ready: Future[None] = Future()
        self._finished: Future[None] = Future()
        self._end = asyncio.Event()
        self._stderr = bytearray()

    def start(self, timeout: float) -> None:
        """Raises InfraError."""
        self._loop.start(self._hold())
        try:
            self._ready.result(timeout)
        except Exception as failure:  # of transport or protocol: there are many kinds, and no base class
            self.close()
            late = isinstance(failure, TimeoutError) and not str(failure)
            reason = (
                f"did not start within {timeout:g} seconds" if late else f"cannot be started: {_unwrap_cause(failure)}"
            )
            raise InfraError(f"MCP server {self._label} {reason}{self.stderr()}") from failure

    def close(self) -> None:
        """End the server and wait for its end."""
        self._loop.call(self._stop)
        with suppress(TimeoutError):  # it cannot even be killed, then
            self._finished.result(CLOSE_SECONDS)

    def _stop(self) -> None:
        self._end.set()
        # A start that hangs waits for no event: it is cancelled.
        if self._task is not None and not self._ready.done():
            self._task.cancel()

    def stderr(self) -> str:
        """Return the end of what the server wrote to standard error, for the end of an error message."""
        text = bytes(self._stderr).decode("utf-8", "replace").strip()
        return f"; its standard error ends:\n{text}" if text else ""

    async def list_tools(self) -> "list[Tool]":
        assert self._client is not None
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor, cache_mode="refresh")
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    async def call_tool(self, tool: str, arguments: dict[str, object]) -> "CallToolResult":
        assert self._client is not None
        return await self._client.call_tool(tool, arguments)

    async def _hold(self) -> None:
        from mcp import Client

        self._task = asyncio.current_task()
        try:
            async with AsyncExitStack() as stack:
                transport = await (self._http(stack) if self._url else self._process(stack))
                self._client = await stack.enter_async_context(Client(transport))
                self._ready.set_result(None)
                await self._end.wait()
        except BaseException as failure:  # for callers that wait for the start; later calls see the failure themselves
            if not self._ready.done():
                self._ready.set_exception(failure if isinstance(failure, Exception) else InfraError("cancelled"))
        finally:
            self._finished.set_result(None)

    async def _http(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        assert self._url is not None
        timeout = httpx2.Timeout(30.0, read=None)  # each call has a deadline of its own
        client = await stack.enter_async_context(httpx2.AsyncClient(headers=self._headers, timeout=timeout))
        return streamable_http_client(self._url, http_client=client)

    async def _process(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client

        assert self._command
        executable, *arguments = self._command
        parameters = StdioServerParameters(command=executable, args=arguments, env=self._env)
        return stdio_client(parameters, errlog=self._error_stream(stack))

    def _error_stream(self, stack: AsyncExitStack) -> TextIO:
        """Return a pipe that keeps the last characters written to it."""
        reader, writer = os.pipe()
        # A read that blocks would stop the loop, and with it all calls.
        os.set_blocking(reader, False)
        loop = asyncio.get_running_loop()

        def take() -> None:
            data = os.read(reader, 65536)
            self._stderr += data
            del self._stderr[:-MAX_STDERR]
            if not data:
                loop.remove_reader(reader)

        def finish() -> None:
            loop.remove_reader(reader)
            os.close(reader)

        loop.add_reader(reader, take)
        stack.callback(finish)
        return stack.enter_context(os.fdopen(writer, "w"))


def _unwrap_cause(failure: BaseException) -> str:
    """Unwrap groups of exceptions with one member, as task groups make them."""
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    return str(failure) or type(failure).__name__
