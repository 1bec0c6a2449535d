"""OpenAI's Responses API on top of the endpoint's chat requests. Independent of HTTP."""

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from skyrl_gym.chat.tool_calls import ToolCall
from skyrl_train.endpoint.errors import ApiError, build_refusal
from skyrl_train.endpoint.openai_api.answer_parts import (
    BlockKind,
    ChatTurn,
    PartsWriter,
    ResponseParts,
    format_arguments,
    generate_id,
)
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend
from skyrl_train.endpoint.openai_api.payloads import Payload
from skyrl_train.endpoint.openai_api.responses_schema import ResponsesRequest, parse_responses_request
from skyrl_train.endpoint.openai_api.responses_translation import SOLE_INPUT, convert_request, encode_thought
from skyrl_train.endpoint.openai_api.sessions import resolve_session
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
        """Handle `POST /v1/responses`. Returns the response, or its events for a stream. Raises ApiError."""
        request = parse_responses_request(raw)
        session = resolve_session(session, request.session_id)
        items: list[JsonObject] = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else []
        items = items or list(request.input)  # pyright: ignore[reportAssignmentType, reportArgumentType]
        if request.previous_response_id is not None:
            items = [*self._store.get_items(request.previous_response_id, session), *items]
        turn = await ChatTurn.prepare(self._frontend, convert_request(request, items), raw, session)

        def keep(response: Payload) -> None:
            if request.store is not False:
                self._store.keep(response, [*items, *response["output"]], session)

        writer = ResponseWriter(num_prompt_tokens=turn.num_prompt_tokens, request=request, keep=keep)
        return turn.stream_events(writer) if request.stream else writer.build(await turn.complete())

    def retrieve(self, name: str, session: str | None) -> Payload:
        """Handle `GET /v1/responses/ID`. Raises ApiError."""
        return self._store.get_response(name, session)

    def delete(self, name: str, session: str | None) -> Payload:
        """Handle `DELETE /v1/responses/ID`. Raises ApiError."""
        self._store.delete(name, session)
        return {"id": name, "object": "response", "deleted": True}


@dataclass(frozen=True)
class _Stored:
    response: Payload
    items: list[JsonObject]
    session: str | None
    num_bytes: int


class ResponseStore:
    """Store of responses that later requests may continue. Responses are visible only within their session.

    Args:
        max_bytes: total JSON size of all conversations, each counted in full; the oldest responses are evicted.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, _Stored] = OrderedDict()

    def keep(self, response: Payload, items: list[JsonObject], session: str | None) -> None:
        """Store a response with its conversation."""
        stored = _Stored(response, items, session, len(json.dumps([response, items])))
        self._stored[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes and len(self._stored) > 1:
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def get_items(self, name: str, session: str | None) -> list[JsonObject]:
        """Return the conversation including a response. Raises ApiError."""
        if (stored := self._find(name, session)) is None:
            raise build_refusal(
                f"Previous response with id '{name}' not found. It was not stored, belongs to another session or was "
                "evicted; send the conversation as input.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return stored.items

    def get_response(self, name: str, session: str | None) -> Payload:
        """Return a response. Raises ApiError."""
        if (stored := self._find(name, session)) is None:
            raise ApiError(404, f"Response with id '{name}' not found.")
        return stored.response

    def delete(self, name: str, session: str | None) -> None:
        """Delete a response. Raises ApiError."""
        self.get_response(name, session)
        self._num_bytes -= self._stored.pop(name).num_bytes

    def _find(self, name: str, session: str | None) -> _Stored | None:
        stored = self._stored.get(name)
        return stored if stored is not None and stored.session == session else None


@dataclass(kw_only=True)
class ResponseWriter(PartsWriter):
    """Writer of a response of the Responses API.

    Args:
        keep: called with the complete response, before its last event.
    """

    request: ResponsesRequest
    keep: Callable[[Payload], None]
    id: str = field(default_factory=lambda: generate_id("resp"), init=False)
    created: float = field(default_factory=time.time, init=False)
    _output: list[Payload] = field(default_factory=list, init=False)
    """Completed items."""
    _item: str = field(default="", init=False)
    """Id of the item that is open."""
    _num_events: int = field(default=0, init=False)

    def begin(self) -> list[Payload]:
        names = ("response.created", "response.in_progress")
        return [self._format_event(name, response=self._build_response("in_progress")) for name in names]

    def open_block(self, kind: BlockKind) -> list[Payload]:
        item = self._build_message("", "in_progress") if kind == "text" else self._build_reasoning("", "in_progress")
        self._item = item["id"]
        part = _build_text_part("") if kind == "text" else _build_reasoning_part("")
        return [
            self._format_added(item | {"content": []}),
            self._format_in_item("response.content_part.added", part=part),
        ]

    def delta(self, kind: BlockKind, text: str) -> list[Payload]:
        if kind == "text":
            return [self._format_in_item("response.output_text.delta", delta=text, logprobs=[])]
        return [self._format_in_item("response.reasoning_text.delta", delta=text)]

    def close_block(self, kind: BlockKind, text: str, is_cut: bool) -> list[Payload]:
        status = "incomplete" if is_cut else "completed"
        if kind == "text":
            done = self._format_in_item("response.output_text.done", text=text, logprobs=[])
            part, item = _build_text_part(text), self._build_message(text, status)
        else:
            done = self._format_in_item("response.reasoning_text.done", text=text)
            part, item = _build_reasoning_part(text), self._build_reasoning(text, status)
        return [
            done,
            self._format_in_item("response.content_part.done", part=part),
            self._format_done(item | {"id": self._item}),
        ]

    def call(self, call: ToolCall) -> list[Payload]:
        item = self._call(call)
        self._item = item["id"]
        argument, name = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            argument, name = "input", "response.custom_tool_call_input"
        text = item[argument]
        place = {"item_id": self._item, "output_index": len(self._output)}
        return [
            self._format_added(item | {argument: ""} | ({"status": "in_progress"} if "status" in item else {})),
            self._format_event(f"{name}.delta", **place, delta=text),
            self._format_event(f"{name}.done", **place, **{argument: text}),
            self._format_done(item),
        ]

    def end(self, parts: ResponseParts) -> list[Payload]:
        is_cut = parts.finish_reason == "length"
        events = [] if self._output else [*self.open_block("text"), *self.close_block("text", "", False)]
        response = self._build_complete(parts)
        return [
            *events,
            self._format_event("response.incomplete" if is_cut else "response.completed", response=response),
        ]

    def fail(self, error: ApiError) -> list[Payload]:
        told = {"code": _FAILURES.get(error.status, "server_error"), "message": error.message}
        return [self._format_event("response.failed", response=self._build_response("failed") | {"error": told})]

    def build(self, parts: ResponseParts) -> Payload:
        for kind, text, _ in parts.iter_blocks():
            status = "incomplete" if parts.is_truncated_in(kind) else "completed"
            self._output.append(
                self._build_message(text, status) if kind == "text" else self._build_reasoning(text, status)
            )
        self._output += [self._call(call) for call in parts.calls]
        if not self._output:
            self._output.append(self._build_message("", "completed"))
        return self._build_complete(parts)

    def _build_complete(self, parts: ResponseParts) -> Payload:
        is_cut = parts.finish_reason == "length"
        response = self._build_response("incomplete" if is_cut else "completed") | {
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

    def _build_response(self, status: str) -> Payload:
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

    def _build_message(self, text: str, status: str) -> Payload:
        content = [_build_text_part(text)]
        return {"id": generate_id("msg"), "type": "message", "status": status, "role": "assistant", "content": content}

    def _build_reasoning(self, text: str, status: str) -> Payload:
        item: Payload = {
            "id": generate_id("rs"),
            "type": "reasoning",
            "summary": [],
            "content": [_build_reasoning_part(text)],
        }
        item["encrypted_content"] = encode_thought(text) if self.request.wants_encrypted_reasoning else None
        return item | {"status": status}

    def _call(self, call: ToolCall) -> Payload:
        known = {named.full_name: named for named in self.request.named_tools}
        namespace, tool = known.get(call.name, (None, None))
        name: Payload = {"call_id": generate_id("call"), "name": call.name if tool is None else tool.name}
        if namespace is not None:
            name["namespace"] = namespace
        text = call.arguments.get(SOLE_INPUT)
        if tool is not None and tool.type == "custom" and isinstance(text, str):
            return {"id": generate_id("ctc"), "type": "custom_tool_call"} | name | {"input": text}
        item = {"id": generate_id("fc"), "type": "function_call", "status": "completed"}
        return item | name | {"arguments": format_arguments(call)}

    def _format_added(self, item: Payload) -> Payload:
        return self._format_event("response.output_item.added", output_index=len(self._output), item=item)

    def _format_done(self, item: Payload) -> Payload:
        self._output.append(item)
        return self._format_event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _format_in_item(self, name: str, **values: object) -> Payload:
        return self._format_event(name, item_id=self._item, output_index=len(self._output), content_index=0, **values)

    def _format_event(self, name: str, **values: object) -> Payload:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1} | values


def _build_text_part(text: str) -> Payload:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _build_reasoning_part(text: str) -> Payload:
    return {"type": "reasoning_text", "text": text}
