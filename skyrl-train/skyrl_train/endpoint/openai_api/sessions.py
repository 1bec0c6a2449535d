"""Sessions of requests: tokens for later prompts, turns for the recorder."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from skyrl_train.endpoint.errors import ApiError, build_refusal
from skyrl_train.endpoint.openai_api.generation import GeneratedChoice
from skyrl_train.endpoint.openai_api.payloads import build_assistant_message
from skyrl_train.endpoint.openai_api.prompts import ChatOptions, ConversationMemory, EndpointTemplate, ReturnedMessage
from skyrl_train.endpoint.openai_api.replies import Reply
from skyrl_train.endpoint.openai_api.schema import Message
from skyrl_train.endpoint.openai_api.tool_calls import convert_messages_for_template
from skyrl_train.endpoint.recorder import RecordedTurn, RequestRecorder, SessionRules
from skyrl_train.types import ConversationType, MessageType

_NOTHING_GENERATED = (400, 413, 422, 429)
"""Statuses of requests rejected by an engine."""

EXACT, RENDERED = "endpoint/exact_turns", "endpoint/rendered_turns"


@dataclass(frozen=True)
class SessionRequest:
    """Request of a session when it is received."""

    session: str | None
    raw: bytes
    messages: ConversationType | None = None
    text: str | None = None
    """Rendered messages; None if the response is not a separate message."""
    started: float = field(default_factory=time.monotonic)


class Sessions:
    """Conversation memory and optional recorder. Requests without a session are not stored."""

    def __init__(self, template: EndpointTemplate, recorder: RequestRecorder | None):
        self._template = template
        self._memory = ConversationMemory(template)
        self._recorder = recorder
        self.counts = {EXACT: 0.0, RENDERED: 0.0}

    def records(self, session: str | None) -> bool:
        return self._recorder is not None and session is not None

    def get_rules(self, session: str | None) -> SessionRules:
        """Return the rules of a request's session. Raises ApiError if it is not open."""
        return SessionRules() if self._recorder is None or session is None else self._recorder.rules(session)

    @contextlib.asynccontextmanager
    async def admit(self, session: str | None, reply: Reply, seconds: float) -> AsyncIterator[None]:
        """Admit a request for the duration of the block: its prompts get the session's seeds and limits, and tokens of
        the session are reserved. A rejected request uses no turn.

        Args:
            seconds: deadline of the request, including the wait for tokens reserved by other requests of the session.

        Raises:
            ApiError: the session's budget is used up.
        """
        if self._recorder is None or session is None:
            yield
            return
        started = time.monotonic()
        most, num_choices = max(prompt.params["max_tokens"] for prompt in reply.prompts), reply.request.num_choices
        try:
            async with asyncio.timeout(seconds):
                admission = await self._recorder.admit(
                    session, num_prompts=len(reply.prompts), num_choices=num_choices, most=most
                )
        except TimeoutError:
            raise ApiError(
                504,
                f"other requests of session {session!r} reserved its token budget for {seconds:g} seconds "
                "(generator.request_timeout_seconds); set max_tokens in requests",
                code="timeout",
            ) from None
        uses_turns = True
        try:
            waited = time.monotonic() - started
            reply.prompts = [
                prompt.apply_rules(seed, admission.max_tokens, waited)
                for prompt, seed in zip(reply.prompts, admission.seeds, strict=True)
            ]
            yield
        except ApiError as error:
            uses_turns = error.status not in _NOTHING_GENERATED
            raise
        finally:
            self._recorder.release(admission, uses_turns=uses_turns)

    def record_full_context(self, session: str | None) -> None:
        """Record that a prompt left no room for a response."""
        if self._recorder is not None and session is not None:
            self._recorder.record_full_context(session)

    def encode_prompt(
        self, session: str | None, messages: ConversationType, text: str, options: ChatOptions
    ) -> list[int]:
        """Return the ids of a conversation, with earlier completions as sampled where possible."""
        if session is not None and self._memory.has_candidate(session, messages):
            ids = self._memory.find_prompt(session, messages, text, options)
            self.counts[RENDERED if ids is None else EXACT] += 1
            if ids is not None:
                return ids
        return self._template.encode(text)

    def keep(self, asked: SessionRequest, reply: Reply, answers: Sequence[GeneratedChoice]) -> None:
        """Store the completed choices of a request."""
        if asked.session is None:
            return
        messages = [None if asked.messages is None else _to_request_message(reply, answer) for answer in answers]
        pairs = [(message, answer) for message, answer in zip(messages, answers, strict=True)]
        if asked.messages is not None and asked.text is not None:
            written = [
                (ReturnedMessage.of(message), answer.token_ids) for message, answer in pairs if message is not None
            ]
            self._memory.remember(asked.session, len(asked.messages), asked.text, reply.prompts[0].ids, written)
        if self._recorder is not None:
            turns = [_build_turn(asked, reply, index, message, answer) for index, (message, answer) in enumerate(pairs)]
            self._recorder.record(asked.session, turns)


def resolve_session(connection: str | None, body: str | int | None) -> str | None:
    """Return the session that a request belongs to. Raises ApiError if it names two.

    Args:
        connection: session of its key, URL or header (`find_connection_session`).
    """
    if connection is not None and body is not None and connection != str(body):
        raise build_refusal(
            f"session_id {body!r} and the session {connection!r} of the key, the URL or X-Session-IDdiffer; pass one "
            "of them",
            "session_id",
        )
    return connection if body is None else str(body)


def find_connection_session(key: str | None, url: str | None, header: str | None) -> str | None:
    """Return the session named by a request's key, URL or header. Raises ApiError if they name two."""
    if url is not None and header is not None and url != header:
        raise build_refusal(f"X-Session-ID {header!r} and the session {url!r} of the URLdiffer; pass one of them")
    named = url or header
    if key is not None and named is not None and named != key:
        raise ApiError(403, f"the key belongs to session {key!r}, the request to session {named!r}")
    return key or named


def _to_request_message(reply: Reply, answer: GeneratedChoice) -> MessageType:
    """Return the message sent to a client in the form of its next request."""
    return convert_messages_for_template([Message.model_validate(build_assistant_message(reply.read(answer)))])[0]


def _build_turn(
    asked: SessionRequest, reply: Reply, index: int, message: MessageType | None, answer: GeneratedChoice
) -> RecordedTurn:
    prompt = reply.get_prompt(index)
    assert answer.log_probs is not None, "the engine returned no log-probs though they were requested"
    assert answer.stop_reason is not None, "the answer is complete"
    return RecordedTurn(
        prompt_ids=prompt.ids,
        response_ids=answer.token_ids,
        log_probs=answer.log_probs,
        weight_versions=answer.weight_versions,
        stop_reason=answer.stop_reason,
        temperature=prompt.params.get("temperature", 1.0),
        messages=asked.messages,
        answer=message,
        request=hashlib.sha256(asked.raw).hexdigest(),
        started=asked.started,
        finished=time.monotonic(),
    )
