"""OpenAI's Responses API over the endpoint's chat requests. Knows no HTTP."""

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from skyrl_gym.chat.tool_calls import ToolCall
from skyrl_train.endpoint.errors import ApiError, refused
from skyrl_train.endpoint.openai_api.answer_parts import (
    AnswerParts,
    AnswerWriter,
    BlockKind,
    ChatTurn,
    arguments_of,
    new_id,
)
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend
from skyrl_train.endpoint.openai_api.payloads import Payload
from skyrl_train.endpoint.openai_api.responses_schema import ResponsesRequest, parsed_responses
from skyrl_train.endpoint.openai_api.responses_translation import SOLE_INPUT, chat_request, encrypted
from skyrl_train.endpoint.openai_api.sessions import one_session
from skyrl_train.types import JsonObject

_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponsesFrontend:
    """Request handlers of the Responses API.

    Args:
        max_stored_bytes: see `ResponseStore`.
    """

    def __init__(self, frontend: OpenAIFrontend, max_stored_bytes: int = 256 * 1024 * 1024):
        self._frontend = frontend
        self._store = ResponseStore(max_stored_bytes)

    async def create(self, raw: bytes, session: str | None = None) -> Payload | AsyncIterator[str]:
        """`POST /v1/responses`: the response, or its events if the request asks for a stream. Raises ApiError."""
        request = parsed_responses(raw)
        session = one_session(session, request.session_id)
        items: list[JsonObject] = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else []
        items = items or list(request.input)  # pyright: ignore[reportAssignmentType, reportArgumentType]
        if request.previous_response_id is not None:
            items = [*self._store.items(request.previous_response_id, session), *items]
        turn = await ChatTurn.opened(self._frontend, chat_request(request, items), raw, session)

        def keep(response: Payload) -> None:
            if request.store is not False:
                self._store.keep(response, [*items, *response["output"]], session)

        writer = ResponseWriter(num_prompt_tokens=turn.num_prompt_tokens, request=request, keep=keep)
        return turn.events(writer) if request.stream else writer.whole(await turn.complete())

    def retrieve(self, name: str, session: str | None) -> Payload:
        """`GET /v1/responses/ID`. Raises ApiError."""
        return self._store.response(name, session)

    def delete(self, name: str, session: str | None) -> Payload:
        """`DELETE /v1/responses/ID`. Raises ApiError."""
        self._store.delete(name, session)
        return {"id": name, "object": "response", "deleted": True}


@dataclass(frozen=True)
class _Stored:
    response: Payload
    items: list[JsonObject]
    session: str | None
    num_bytes: int


class ResponseStore:
    """Responses that later requests may go on from. A session's are not known in others.

    Args:
        max_bytes: of all conversations as JSON, each counted whole; the oldest responses are dropped first.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, _Stored] = OrderedDict()

    def keep(self, response: Payload, items: list[JsonObject], session: str | None) -> None:
        """Store a response with the conversation that it ends."""
        stored = _Stored(response, items, session, len(json.dumps([response, items])))
        self._stored[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes and len(self._stored) > 1:
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def items(self, name: str, session: str | None) -> list[JsonObject]:
        """Return the conversation up to a response. Raises ApiError."""
        if (stored := self._find(name, session)) is None:
            raise refused(
                f"Previous response with id '{name}' not found. It was not stored, is of another session or was "
                "dropped; send the conversation as input.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return stored.items

    def response(self, name: str, session: str | None) -> Payload:
        """Return a response. Raises ApiError."""
        if (stored := self._find(name, session)) is None:
            raise ApiError(404, f"Response with id '{name}' not found.")
        return stored.response

    def delete(self, name: str, session: str | None) -> None:
        """Forget a response. Raises ApiError."""
        self.response(name, session)
        self._num_bytes -= self._stored.pop(name).num_bytes

    def _find(self, name: str, session: str | None) -> _Stored | None:
        stored = self._stored.get(name)
        return stored if stored is not None and stored.session == session else None


@dataclass(kw_only=True)
class ResponseWriter(AnswerWriter):
    """Answer as a response.

    Args:
        keep: called with the complete response, before its last event.
    """

    request: ResponsesRequest
    keep: Callable[[Payload], None]
    id: str = field(default_factory=lambda: new_id("resp"), init=False)
    created: float = field(default_factory=time.time, init=False)
    _output: list[Payload] = field(default_factory=list, init=False)
    """Items that are complete."""
    _item: str = field(default="", init=False)
    """Id of the item that is open."""
    _num_events: int = field(default=0, init=False)

    def begin(self) -> list[Payload]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response("in_progress")) for name in names]

    def open_block(self, kind: BlockKind) -> list[Payload]:
        item = self._message("", "in_progress") if kind == "text" else self._reasoning("", "in_progress")
        self._item = item["id"]
        part = _text_part("") if kind == "text" else _reasoning_part("")
        return [self._added(item | {"content": []}), self._in_item("response.content_part.added", part=part)]

    def delta(self, kind: BlockKind, text: str) -> list[Payload]:
        if kind == "text":
            return [self._in_item("response.output_text.delta", delta=text, logprobs=[])]
        return [self._in_item("response.reasoning_text.delta", delta=text)]

    def close_block(self, kind: BlockKind, text: str, is_cut: bool) -> list[Payload]:
        status = "incomplete" if is_cut else "completed"
        if kind == "text":
            done = self._in_item("response.output_text.done", text=text, logprobs=[])
            part, item = _text_part(text), self._message(text, status)
        else:
            done = self._in_item("response.reasoning_text.done", text=text)
            part, item = _reasoning_part(text), self._reasoning(text, status)
        return [done, self._in_item("response.content_part.done", part=part), self._done(item | {"id": self._item})]

    def call(self, call: ToolCall) -> list[Payload]:
        item = self._call(call)
        self._item = item["id"]
        argument, name = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            argument, name = "input", "response.custom_tool_call_input"
        text = item[argument]
        place = {"item_id": self._item, "output_index": len(self._output)}
        return [
            self._added(item | {argument: ""} | ({"status": "in_progress"} if "status" in item else {})),
            self._event(f"{name}.delta", **place, delta=text),
            self._event(f"{name}.done", **place, **{argument: text}),
            self._done(item),
        ]

    def end(self, parts: AnswerParts) -> list[Payload]:
        is_cut = parts.finish_reason == "length"
        events = [] if self._output else [*self.open_block("text"), *self.close_block("text", "", False)]
        response = self._complete(parts)
        return [*events, self._event("response.incomplete" if is_cut else "response.completed", response=response)]

    def fail(self, error: ApiError) -> list[Payload]:
        told = {"code": _FAILURES.get(error.status, "server_error"), "message": error.message}
        return [self._event("response.failed", response=self._response("failed") | {"error": told})]

    def whole(self, parts: AnswerParts) -> Payload:
        for kind, text, _ in parts.blocks():
            status = "incomplete" if parts.cuts(kind) else "completed"
            self._output.append(self._message(text, status) if kind == "text" else self._reasoning(text, status))
        self._output += [self._call(call) for call in parts.calls]
        if not self._output:
            self._output.append(self._message("", "completed"))
        return self._complete(parts)

    def _complete(self, parts: AnswerParts) -> Payload:
        is_cut = parts.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed") | {
            "completed_at": None if is_cut else time.time(),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": self.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": parts.num_tokens,
                "output_tokens_details": {"reasoning_tokens": parts.num_thought_tokens},
                "total_tokens": self.num_prompt_tokens + parts.num_tokens,
            },
        }
        self.keep(response)
        return response

    def _response(self, status: str) -> Payload:
        request = self.request
        text = {} if request.text is None else request.text.model_dump(exclude_none=True, by_alias=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": list(self._output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.effort, "summary": None},
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in request.tools or []],
            "top_logprobs": 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def _message(self, text: str, status: str) -> Payload:
        content = [_text_part(text)]
        return {"id": new_id("msg"), "type": "message", "status": status, "role": "assistant", "content": content}

    def _reasoning(self, text: str, status: str) -> Payload:
        item: Payload = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": [_reasoning_part(text)]}
        item["encrypted_content"] = encrypted(text) if self.request.wants_encrypted_reasoning else None
        return item | {"status": status}

    def _call(self, call: ToolCall) -> Payload:
        known = {named.full_name: named for named in self.request.named_tools}
        namespace, tool = known.get(call.name, (None, None))
        name: Payload = {"call_id": new_id("call"), "name": call.name if tool is None else tool.name}
        if namespace is not None:
            name["namespace"] = namespace
        text = call.arguments.get(SOLE_INPUT)
        if tool is not None and tool.type == "custom" and isinstance(text, str):
            return {"id": new_id("ctc"), "type": "custom_tool_call"} | name | {"input": text}
        item = {"id": new_id("fc"), "type": "function_call", "status": "completed"}
        return item | name | {"arguments": arguments_of(call)}

    def _added(self, item: Payload) -> Payload:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: Payload) -> Payload:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _in_item(self, name: str, **values: object) -> Payload:
        return self._event(name, item_id=self._item, output_index=len(self._output), content_index=0, **values)

    def _event(self, name: str, **values: object) -> Payload:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1} | values


def _text_part(text: str) -> Payload:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> Payload:
    return {"type": "reasoning_text", "text": text}
