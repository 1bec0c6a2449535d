"""Client of a model server with OpenAI's `POST /chat/completions`. Independent of environments and graders."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_gym.error import Error
from skyrl_gym.services import Service
from skyrl_gym.valid_unicode import replace_lone_surrogates


class ModelError(Error):
    """The server answered, but not with a reply: it refused the conversation (too long, say) or sent nonsense."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        """HTTP status of the response; 200 if its body is not a chat completion."""
        self.text = text

    def __str__(self) -> str:
        what = "not a chat completion" if self.status == 200 else f"status {self.status}"
        return f"{what}: {self.text:.500}"


@dataclass(frozen=True)
class Reply:
    """One turn of a model."""

    text: str
    finish_reason: str | None = None
    stop_reason: object = None
    """The string or token that ended it, where a server tells (vLLM does)."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Wall clock, attempts that failed included."""


@dataclass(frozen=True)
class ChatModel:
    """Client of one chat model. Thread-safe."""

    service: Service
    """Service at the server's base URL, which ends in `/v1`."""
    model: str
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of each request other than `model` and `messages`."""

    def complete(self, messages: Sequence[Mapping[str, object]], **fields: object) -> Reply:
        """Request the model's next turn. `fields` are additional fields of this request.

        Raises:
            InfraError: the server was unreachable or failed in every attempt.
            ModelError: the response contains no message.
        """
        started = time.monotonic()
        request = {**self.fields, **fields, "model": self.model, "messages": messages}
        response = self.service.request(request, path="/chat/completions")
        if response.status != 200:
            raise ModelError(response.status, response.text)
        try:
            answer = json.loads(response.body)
            choice = answer["choices"][0]
            usage = answer.get("usage") or {}
            return Reply(
                text=replace_lone_surrogates(choice["message"].get("content") or ""),
                finish_reason=choice.get("finish_reason"),
                stop_reason=choice.get("stop_reason"),
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
                seconds=time.monotonic() - started,
            )
        except (ValueError, LookupError, TypeError, AttributeError) as failure:
            raise ModelError(200, response.text) from failure
