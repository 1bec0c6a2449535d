"""Client of a runtime on a server (`python -m skyrl_agent.services.runtime`)."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Self
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes.base import ExecResult, Limits, RuntimeSpec, Snapshot
from skyrl_agent.runtimes.wire import (
    POLL_SECONDS,
    Body,
    CommandState,
    ErrorReply,
    NewCommand,
    NewRuntime,
    RuntimeState,
)
from skyrl_gym.sandbox.command import TURN_SECONDS, as_bytes
from skyrl_gym.services import certificates, is_loopback, origin_of

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""Timeout of a start: until the server has capacity, for the image and for setup commands."""
REQUEST_SECONDS = 60.0
"""Timeout of one attempt, in addition to the time that the server waits on purpose."""
RETRY_SECONDS = 60.0
"""Time for which a server may be unreachable."""
REFUSED_SECONDS = 5.0
"""Longest time without a connection to a server that has never answered."""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
MARGIN_SECONDS = 120.0
CANCEL_SECONDS = 10.0
BEATS_PER_LEASE = 4


class RemoteRuntime:
    """A `Runtime`. Made by `make_runtime`.

    Requests without a reply are retried for a limited time: ids make that safe. Bodies and files pass in memory.
    """

    workdir, python = "/workspace", "python3"

    def __init__(self, spec: RuntimeSpec) -> None:
        self.id = uuid.uuid4().hex
        self.spec = spec
        url = spec.url or ""
        try:
            origin_of(url, "runtime.url")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._server = url.rstrip("/")
        self._url = f"{self._server}/runtimes/{self.id}"
        self._is_known = False
        """The server has answered."""
        self._client: httpx.AsyncClient | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    async def probe(self) -> None:
        """Query the server's health. Raises InfraError if it is unreachable, not a runtime server, or rejects the
        token.
        """
        async with self._create_client() as client:
            deadline = time.monotonic() + REFUSED_SECONDS
            while True:
                try:
                    answer = await client.get(f"{self._server}/health", timeout=REFUSED_SECONDS)
                    break
                except httpx.HTTPError as error:
                    if time.monotonic() + FIRST_PAUSE_SECONDS > deadline:
                        raise InfraError(_NO_ANSWER.format(_format_error(error))) from error
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
        if answer.status_code in (401, 403):
            raise InfraError(
                f"the server rejected the request: {answer.text:.300} (runtime.token_env names the token's variable)"
            )
        if not answer.is_success or "max_runtimes" not in answer.text:
            raise InfraError(_NO_SERVER.format(f"GET /health: status {answer.status_code}: {answer.text:.100}"))
        if self.spec.image and answer.json().get("kind") == "local":
            raise ConfigError(
                f"the image {self.spec.image} (runtime.image, or a task's own) needs containers, and the runtime "
                f"server at {self._server} has none (--kind local): start it with --kind docker or podman, or remove "
                "the image"
            )

    async def start(self) -> None:
        if self._client is not None:
            raise InfraError(f"runtime {self.id} has already been started")
        self._client = self._create_client()
        try:
            deadline = time.monotonic() + START_SECONDS
            self._heartbeat = asyncio.create_task(
                self._send_heartbeats()
            )  # early: the first reply may take longer than the lease
            state = await self._send(RuntimeState, "PUT", body=self._build_request(), retry_seconds=START_SECONDS)
            while not state.ready:
                if time.monotonic() > deadline:
                    raise InfraError(f"runtime {self.id} at {self.spec.url} was not ready within {START_SECONDS:g} s")
                state = await self._send(RuntimeState, "GET")
            self.workdir, self.python = state.workdir, state.python
        except BaseException:
            await self.close()
            raise

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        body = NewCommand(
            command=command if isinstance(command, str) else list(command),
            stdin=as_bytes(stdin),
            env=dict(env or {}),
            timeout=timeout,
            limits=limits,
        )
        path = f"/commands/{uuid.uuid4().hex}"
        seconds = timeout or (limits or self.spec.limits).wall_seconds
        deadline = time.monotonic() + seconds + TURN_SECONDS + MARGIN_SECONDS
        try:
            state = await self._send(CommandState, "PUT", path, body=body)
            while state.result is None:
                if time.monotonic() > deadline:
                    raise InfraError(
                        f"a command in runtime {self.id} did not finish long after its limit of {seconds:g} s"
                    )
                state = await self._send(CommandState, "GET", path)
            return state.result
        except asyncio.CancelledError:
            with suppress(InfraError):
                await self._send_with_retries("DELETE", path, retry_seconds=CANCEL_SECONDS)
            raise

    async def write(self, path: str, data: str | bytes) -> None:
        await self._send_with_retries("PUT", f"/files?path={quote(path, safe='')}", content=as_bytes(data))

    async def read(self, path: str) -> bytes:
        return await self._send_with_retries("GET", f"/files?path={quote(path, safe='')}")

    async def snapshot(self) -> Snapshot:
        return Snapshot("tar", await self._send_with_retries("GET", "/snapshot", wait=TURN_SECONDS))

    async def close(self) -> None:
        client, heartbeat = self._client, self._heartbeat
        if client is None or client.is_closed:
            return
        if heartbeat is not None:
            heartbeat.cancel()
        try:
            # A server may have received a request without replying; if it is unreachable, one attempt is enough.
            await self._send_with_retries("DELETE", retry_seconds=CANCEL_SECONDS if self._is_known else 0.0)
        except Exception as error:  # the server closes it when the lease expires
            logger.warning("runtime %s at %s could not be closed: %s", self.id, self.spec.url, error)
        finally:
            await client.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _create_client(self) -> httpx.AsyncClient:
        headers = {b"Authorization": f"Bearer {self.spec.token}".encode()} if self.spec.token else {}
        trust_env = not is_loopback(httpx.URL(self._url).host)
        return httpx.AsyncClient(headers=headers, verify=certificates(), trust_env=trust_env)

    def _build_request(self) -> NewRuntime:
        spec, snapshot = self.spec, self.spec.snapshot
        is_image = snapshot is not None and snapshot.kind == "image"
        return NewRuntime(
            image=str(snapshot.value) if snapshot is not None and is_image else spec.image,
            workdir=spec.workdir,
            files={path: as_bytes(data) for path, data in spec.files.items()} if snapshot is None else {},
            setup=spec.setup,
            env=dict(spec.env),
            limits=spec.limits,
            lease_seconds=spec.lease_seconds,
            snapshot=as_bytes(snapshot.value) if snapshot is not None and not is_image else None,
        )

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.spec.lease_seconds / BEATS_PER_LEASE)
            with suppress(InfraError):  # calls of the runtime will report it
                await self._send_with_retries("POST", "/lease", retry_seconds=0)

    async def _send(
        self, kind: type["ServerReply"], method: str, path: str = "", *, body: Body | None = None, **settings: Any
    ) -> Any:
        content = body.model_dump_json().encode() if body else None
        answer = await self._send_with_retries(
            method, f"{path}?wait={POLL_SECONDS:g}", content, wait=POLL_SECONDS, **settings
        )
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            raise InfraError(f"{self.spec.url} sent an unexpected response for a runtime server: {error}") from None

    async def _send_with_retries(
        self,
        method: str,
        path: str = "",
        content: bytes | None = None,
        *,
        wait: float = 0.0,
        retry_seconds: float | None = None,
    ) -> bytes:
        """
        Raises:
            InfraError, ValueError, FileNotFoundError: what the server says; InfraError if it says nothing for so long.
        """
        if self._client is None or self._client.is_closed:
            raise InfraError(f"runtime {self.id} is not started, or closed")
        most = RETRY_SECONDS if retry_seconds is None else retry_seconds
        pause, limit, deadline, last_deadline = FIRST_PAUSE_SECONDS, math.inf, math.inf, math.inf
        while True:
            is_refused = False
            try:
                answer = await self._client.request(
                    method, self._url + path, content=content, timeout=httpx.Timeout(REQUEST_SECONDS + wait, connect=10)
                )
                if answer.is_success:
                    self._is_known = True
                    return answer.content
                problem = _parse_error(answer)
                if isinstance(problem, str) and answer.status_code not in _PASSING:
                    raise InfraError(f"{self.spec.url}: {_NO_SERVER.format(problem)}")
            except httpx.HTTPError as error:
                problem = _format_error(error)
                is_refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and not self._is_known
            if isinstance(problem, ErrorReply):
                self._is_known = True
                if problem.kind != "full":
                    self._raise(problem)
                seconds, reason = most, problem.message
            else:
                seconds, reason = min(most, REFUSED_SECONDS if is_refused else RETRY_SECONDS), problem
            now = time.monotonic()  # measured from the first failure, which may itself take long
            last_deadline = min(last_deadline, now + most)
            if seconds != limit:  # another kind of failure
                limit, deadline = seconds, min(now + seconds, last_deadline)
                if limit > 0:
                    logger.warning("runtime server %s: %.200s; retrying for %g s", self.spec.url, reason, limit)
            if time.monotonic() + pause > deadline:
                raise InfraError(f"the runtime server {self.spec.url} failed for {limit:g} s; last: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _raise(self, problem: ErrorReply) -> NoReturn:
        if problem.kind == "missing_file":
            raise FileNotFoundError(problem.message)
        if problem.kind == "value":
            raise ValueError(problem.message)
        raise InfraError(f"{self.spec.url}: {problem.message}")


ServerReply = RuntimeState | CommandState


_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that a proxy returns while a server is temporarily unavailable."""
_NO_ANSWER = "no server responds: {}; start one there with `python -m skyrl_agent.services.runtime`"
_NO_SERVER = "the server there is not a runtime server: {}"


def _format_error(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}"


def _parse_error(answer: httpx.Response) -> ErrorReply | str:
    """Return the error text of a reply; plain text if it comes from a proxy instead of the server."""
    try:
        return ErrorReply.model_validate_json(answer.content)
    except ValidationError:
        return f"status {answer.status_code}: {answer.text:.300}"
