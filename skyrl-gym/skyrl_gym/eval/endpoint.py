"""The model that is evaluated, behind an OpenAI-compatible server. Independent of environments."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skyrl_gym.chat_model import ChatModel, ModelError, Reply
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.error import Error
from skyrl_gym.services import Cancelled, Retries, Service

__all__ = ["Cancelled", "ChatEndpoint", "EndpointRefused", "ModelError", "Reply", "with_stop_string"]

LONGEST_WAIT_SECONDS = 60.0
"""Between two attempts, whatever the server asks for."""

_REFUSED = {401: "--api-key-env", 403: "--api-key-env", 404: "--base-url or --model", 405: "--base-url"}


class EndpointRefused(Error):
    """The server wants another key, model or address. No episode will work; the text names the flag."""


class ChatEndpoint:
    """Chat completions from one model, from any number of threads.

    Args:
        sampling: fields of each request in addition to `model` and `messages`.
        stop: strings that end a turn. Servers cut them off; `complete` puts them back.
        api_key: sent as a bearer token.
        cancelled: ends waiting and further requests when set.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        sampling: Mapping[str, object] | None = None,
        stop: Sequence[str] = (),
        api_key: str | None = None,
        max_retries: int = 5,
        retry_seconds: float = 1.0,
        request_seconds: float = 600.0,
        cancelled: threading.Event | None = None,
    ) -> None:
        self.stop = list(stop)
        retries = Retries(max_retries + 1, retry_seconds, LONGEST_WAIT_SECONDS)
        service = Service(base_url, api_key=api_key, timeout=request_seconds, retries=retries, cancelled=cancelled)
        self._model = ChatModel(service, model, {**(sampling or {}), **({"stop": self.stop} if self.stop else {})})

    def close(self) -> None:
        self._model.service.close()

    def check(self) -> None:
        """Raises InfraError if nothing answers at the address, EndpointRefused if the key is not accepted."""
        # Not every server lists its models, so only the key matters here.
        response = self._model.service.request(path="/models", method="GET")
        if response.status in (401, 403):
            raise self._make_refusal(response.status, response.text)

    def complete(self, messages: ConversationType, seed: int | None = None) -> Reply:
        """Request the model's next turn. `seed` is sent to the server, if given.

        Raises:
            InfraError: the server was unreachable or failed in every attempt.
            ModelError: the response contains no message.
            EndpointRefused: the key, model or address is wrong.
        """
        try:
            reply = self._model.complete(messages, **({} if seed is None else {"seed": seed}))
        except ModelError as failure:
            # These statuses are the same for each request: going on would fail every episode.
            if failure.status in _REFUSED:
                raise self._make_refusal(failure.status, failure.text) from failure
            raise
        if reply.finish_reason != "stop":
            return reply
        return replace(reply, text=with_stop_string(reply.text, self.stop, reply.stop_reason))

    def _make_refusal(self, status: int, text: str) -> EndpointRefused:
        return EndpointRefused(
            f"{self._model.service.url} answered with status {status} for model {self._model.model!r}: {text:.200} "
            f"(check {_REFUSED[status]})"
        )


def with_stop_string(text: str, stop: Sequence[str], stop_reason: object = None) -> str:
    """Return the text with the stop string that ended it, which servers cut off and environments look for.

    `stop_reason` is the string itself where a server tells it (vLLM does). Where it does not, a closing tag is put back
    if its opening tag is the last one that the text leaves open.
    """
    if any(text.endswith(each) for each in stop):
        return text
    if isinstance(stop_reason, str) and stop_reason in stop:
        return text + stop_reason
    opened = [(_find_last_open(text, tag[1]), each) for each in stop if (tag := re.fullmatch(r"</([\w-]+)>", each))]
    # The tag that was opened last is the one that the model was about to close.
    place, closing = max(opened, default=(-1, ""))
    return text + closing if place >= 0 else text


def _find_last_open(text: str, tag: str) -> int:
    """Find the index of an opening tag that is not closed after it, or -1."""
    opening = text.rfind(f"<{tag}>")
    return opening if opening > text.rfind(f"</{tag}>") else -1
