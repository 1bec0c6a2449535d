"""Session with an OpenEnv server: JSON messages over a WebSocket, one environment a connection.

The HTTP routes `/reset` and `/step` of such a server make an environment for each call, so they play no episode.
"""

import json
import time
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from skyrl_gym.error import Error, InfraError
from skyrl_gym.services import Service, is_loopback, origin_of
from skyrl_gym.waits import waiting

Payload = dict[str, Any]

FULL = "CAPACITY_REACHED"
BAD_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of answers that may be due to what the model wrote; all others are failures of the server."""
FULL_WAIT = 0.5
MAX_MESSAGE_BYTES = 64 << 20


class Refused(Exception):
    """The server refused an action; the text is its reason."""


class Session:
    """Connection that plays one episode at a time. Not thread-safe.

    Args:
        base_url: of the server, as `http://host:port`.
        seconds: maximum time of an answer, and of waiting for a free place.
        api_key: sent as a bearer token.

    Raises:
        Error: the package websockets is not installed.
        InfraError: no server answers, or it has no free place within that time.
        ValueError: `base_url` is not an http address.
    """

    def __init__(self, base_url: str, seconds: float, api_key: str | None = None) -> None:
        origin_of(base_url)
        self.base_url = base_url.rstrip("/")
        self.seconds = seconds
        self.api_key = api_key
        self._deadline = time.monotonic() + seconds
        self._connection = ExitStack()
        self._socket = self._connect()

    def _connect(self) -> Any:
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ImportError as missing:
            raise Error("OpenEnv servers need the package websockets: pip install websockets") from missing
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
        address = f"ws{self.base_url.removeprefix('http')}/ws"
        try:
            connection = connect(
                address,
                additional_headers=headers,
                open_timeout=self.seconds,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None if is_loopback(urlsplit(address).hostname) else True,
            )
            return self._connection.enter_context(connection)
        except (WebSocketException, OSError) as failure:
            raise InfraError(
                f"no OpenEnv server responds at {address}: {type(failure).__name__}: {failure}"
            ) from failure

    def schema(self) -> Payload:
        """Return the JSON schemas of the server's actions and observations. Raises InfraError."""
        service = Service(f"{self.base_url}/schema", api_key=self.api_key, timeout=self.seconds)
        response = service.request(method="GET")
        service.close()
        if response.status != 200:
            raise InfraError(f"{self.base_url}/schema returned {response.status}: {response.text:.200}")
        return json.loads(response.body)

    def reset(self, arguments: Payload) -> Payload:
        """Begin an episode. Returns `observation`, `reward`, `done`. Waits while the server has no free place.

        Raises InfraError.
        """
        while True:
            try:
                return self._ask("reset", arguments)
            except Refused as refusal:
                raise InfraError(f"{self.base_url} rejected reset({json.dumps(arguments)}): {refusal}") from None
            except _Full as full:
                if time.monotonic() > self._deadline:
                    text = f"{self.base_url} had no free slot within {self.seconds:g} s: {full}"
                    raise InfraError(
                        f"{text}; it needs one slot for each concurrent episode (max_concurrent_envs)"
                    ) from None
                time.sleep(FULL_WAIT)
                self.close()
                self._socket = self._connect()

    def step(self, action: Payload) -> Payload:
        """Take an action. Raises Refused: it is not one. InfraError: the server failed."""
        return self._ask("step", action)

    def _ask(self, kind: str, data: Payload) -> Payload:
        from websockets.exceptions import WebSocketException

        text = ""
        try:
            with waiting(f"the answer to {kind}", on=self.base_url, deadline=self.seconds):
                # A full server responds and closes before a request is sent; its response can still be read.
                with suppress(WebSocketException, OSError):
                    self._socket.send(json.dumps({"type": kind, "data": data}))
                text = self._socket.recv(timeout=self.seconds)
            answer = json.loads(text)
            content = answer["data"]
        except TimeoutError:
            raise InfraError(f"{self.base_url} did not respond to {kind} within {self.seconds:g} s") from None
        except (WebSocketException, OSError) as failure:
            raise InfraError(f"{self.base_url} closed the connection during {kind}: {failure}") from failure
        except (ValueError, KeyError, TypeError) as failure:
            raise InfraError(f"{self.base_url} answered {kind} with {text!r:.200}: {failure!r}") from failure
        if answer.get("type") != "error":
            return content
        code, reason = content.get("code"), json.dumps(content.get("errors") or content.get("message"), default=str)
        if code in BAD_ACTION:
            raise Refused(reason)
        if code == FULL:
            raise _Full(reason)
        raise InfraError(f"{self.base_url} answered {kind} with {code}: {reason:.500}")

    def close(self) -> None:
        """End the session. May be called more than once."""
        self._connection.close()


class _Full(Exception):
    """The server has no place for a further session."""
