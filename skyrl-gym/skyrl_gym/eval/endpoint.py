"""A client of an OpenAI-compatible server. Knows no environments."""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.error import Error, InfraError

LONGEST_WAIT_SECONDS = 60.0
"""Between two attempts, whatever the server asks for."""

_RETRIED = {408, 425, 429, 500, 502, 503, 504}
_REFUSED = {401: "--api-key-env", 403: "--api-key-env", 404: "--base-url or --model", 405: "--base-url"}


class ModelError(Exception):
    """The server answered, but not with a reply: it refused this conversation (too long, say) or sent nonsense."""


class EndpointRefused(Error):
    """The server wants another key, model or address. No episode will work; the text names the flag."""


class Cancelled(Exception):
    """The evaluation is being stopped."""


@dataclass(frozen=True)
class Reply:
    """One turn of a model."""

    text: str
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Wall clock, attempts that failed included."""


class ChatEndpoint:
    """Chat completions from one model, from any number of threads.

    Args:
        sampling: fields of each request beside `model` and `messages`.
        stop: strings that end a turn. Servers cut them off; `complete` puts them back.
        api_key: sent as a bearer token.
        cancelled: ends waiting and further requests when set.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        sampling: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        api_key: str | None = None,
        max_retries: int = 5,
        retry_seconds: float = 1.0,
        request_seconds: float = 600.0,
        max_connections: int = 100,
        cancelled: threading.Event | None = None,
    ) -> None:
        self.model = model
        self.sampling = dict(sampling or {})
        self.stop = list(stop)
        self.max_retries = max_retries
        self.retry_seconds = retry_seconds
        self.cancelled = cancelled or threading.Event()
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(request_seconds, connect=min(request_seconds, 10.0)),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )

    def close(self) -> None:
        self._client.close()

    def check(self) -> None:
        """Raises InfraError if nothing answers at the address, EndpointRefused if the key is not accepted."""
        # Not every server lists its models, so only the key matters here.
        response = self._send("GET", "/models")
        if response.status_code in (401, 403):
            raise self._refused(response)

    def complete(self, messages: ConversationType, seed: int | None = None) -> Reply:
        """The model's next turn. `seed` goes to the server, if given.

        Raises:
            InfraError: the server could not be reached or failed, as often as it may be tried.
            ModelError: it answered, but there is no reply in it.
            EndpointRefused: key, model or address are wrong.
        """
        started = time.monotonic()
        body: dict[str, Any] = {"model": self.model, "messages": messages, **self.sampling}
        if self.stop:
            body["stop"] = self.stop
        if seed is not None:
            body["seed"] = seed
        response = self._send("POST", "/chat/completions", body)
        if response.status_code in _REFUSED:
            raise self._refused(response)
        if response.status_code != 200:
            raise ModelError(f"status {response.status_code}: {response.text[:500]}")
        return self._reply(response, time.monotonic() - started)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """One request, repeated while the server or the network fails."""
        for attempt in range(self.max_retries + 1):
            if self.cancelled.is_set():
                raise Cancelled
            asked_seconds = 0.0
            try:
                response = self._client.request(method, self.base_url + path, json=body)
                if response.status_code not in _RETRIED:
                    return response
                problem = f"status {response.status_code}: {response.text[:200]}"
                asked_seconds = _seconds(response.headers.get("Retry-After"))
            except httpx.HTTPError as failure:
                problem = f"{type(failure).__name__}: {failure}"
            if attempt < self.max_retries:
                wait = max(self.retry_seconds * 2**attempt, asked_seconds)
                self.cancelled.wait(min(wait, LONGEST_WAIT_SECONDS))
        raise InfraError(f"{self.base_url}{path} failed {self.max_retries + 1} times; last: {problem}")

    def _refused(self, response: httpx.Response) -> EndpointRefused:
        flag = _REFUSED[response.status_code]
        return EndpointRefused(
            f"{response.request.url} answered with status {response.status_code} for model {self.model!r}: "
            f"{response.text[:200]} (check {flag})"
        )

    def _reply(self, response: httpx.Response, seconds: float) -> Reply:
        try:
            answer = response.json()
            choice = answer["choices"][0]
            text = _valid_unicode(choice["message"].get("content") or "")
            usage = answer.get("usage") or {}
        except (ValueError, LookupError, TypeError, AttributeError) as failure:
            raise ModelError(f"no reply in the answer ({failure!r}): {response.text[:500]}") from failure
        finish_reason = choice.get("finish_reason")
        if finish_reason == "stop":
            text = with_stop_string(text, self.stop, choice.get("stop_reason"))
        return Reply(
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            seconds=seconds,
        )


def with_stop_string(text: str, stop: Sequence[str], stop_reason: Any = None) -> str:
    """The text with the stop string that ended it, which servers cut off and environments look for.

    `stop_reason` is the string itself where a server tells it (vLLM does). Where it does not, a closing tag is put back
    if its opening tag is the last one that the text leaves open.
    """
    if any(text.endswith(each) for each in stop):
        return text
    if isinstance(stop_reason, str) and stop_reason in stop:
        return text + stop_reason
    opened = [(_last_open(text, tag[1]), each) for each in stop if (tag := re.fullmatch(r"</([\w-]+)>", each))]
    place, closing = max(opened, default=(-1, ""))
    return text + closing if place >= 0 else text


def _last_open(text: str, tag: str) -> int:
    """Where a tag is opened and not closed after it, or -1."""
    opening = text.rfind(f"<{tag}>")
    return opening if opening > text.rfind(f"</{tag}>") else -1


def _valid_unicode(text: str) -> str:
    """Halves of characters, which JSON can carry and UTF-8 cannot, become U+FFFD: the text has to be sent again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After header; a date, which it may hold too, is not waited for."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        return 0.0
