"""Requests of OpenAI's Responses API as typed values, by the rules of `schema.py`."""

from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyrl_train.endpoint.errors import ApiError, build_refusal
from skyrl_train.endpoint.openai_api.field_errors import find_field_error
from skyrl_train.endpoint.openai_api.schema import StreamOptions, parse_json_object, validate_fields
from skyrl_train.types import JsonObject

Item = TypeVar("Item", bound=BaseModel)

_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "background": ((None, False), "wait for the response, or stream it"),
    "context_management": ((None, []), "shorten the conversation in the client"),
    "conversation": ((None,), "use previous_response_id, or send the conversation"),
    "moderation": ((None,), "remove the field"),
    "prompt": ((None,), "stored prompts are not supported: use instructions and input"),
    "top_logprobs": ((None, 0), "use /v1/chat/completions"),
    "truncation": ((None, "disabled"), "shorten the conversation in the client"),
}
"""Field -> its values without effect, and advice for any other value."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(_Part):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(_Part):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class UnsupportedPart(_Part):
    """Part of the API that a text model does not support."""

    type: Literal["input_image", "input_file", "input_audio", "computer_screenshot"]


Content = str | list[Annotated[TextPart | RefusalPart | UnsupportedPart, Field(discriminator="type")]]


class MessageItem(_Part):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class _CallItem(_Part):
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        return get_full_name(self.namespace, self.name)


class CallItem(_CallItem):
    arguments: str


class CustomCallItem(_CallItem):
    input: str


class CallOutputItem(_Part):
    call_id: str = Field(min_length=1)
    output: Content


class ReasoningText(_Part):
    text: str


class ReasoningItem(_Part):
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class Tool(_Part):
    """A function, a custom tool (with text input), or a namespace of such tools."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: JsonObject | None = None
    tools: list["Tool"] | None = None


class NamedTool(NamedTuple):
    """Reference to a tool that may be called."""

    namespace: str | None
    tool: Tool

    @property
    def full_name(self) -> str:
        return get_full_name(self.namespace, self.tool.name or "")


def get_full_name(namespace: str | None, name: str) -> str:
    """Return a tool's name for the chat template, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


class TextFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: str | list[JsonObject]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    session_id: str | int | None = None

    # Taken and not read.
    access_programs: object = None
    client_metadata: dict[str, object] | None = None
    max_tool_calls: int | None = None  # of tools that OpenAI's servers run
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, object] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    # Accepted only with values that have no effect.
    background: bool | None = None
    context_management: object = None
    conversation: object = None
    moderation: object = None
    prompt: object = None
    top_logprobs: int | None = None
    truncation: str | None = None

    @property
    def named_tools(self) -> list[NamedTool]:
        """Tools that may be called, including the ones in namespaces."""
        spaces = [
            (tool.name, tool.tools or []) if tool.type == "namespace" else (None, [tool]) for tool in self.tools or []
        ]
        return [NamedTool(space, tool) for space, tools in spaces for tool in tools]

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or [])


def parse_responses_request(raw: bytes) -> ResponsesRequest:
    """Parse a request's body. Raises ApiError."""
    values = parse_json_object(raw)
    request = validate_fields(ResponsesRequest, values)
    for name, (neutral, instead) in _NEUTRAL.items():
        if values.get(name) not in neutral:
            raise build_refusal(f"{name}={values[name]!r} is not supported; {instead}", name, "unsupported_value")
    if not request.input:
        raise build_refusal("input must not be empty", "input")
    if request.stream_options is not None and not request.stream:
        raise build_refusal("stream_options requires stream=true", "stream_options")
    if "message.output_text.logprobs" in (request.include or []):
        raise build_refusal(
            "include: log-probs are available from /v1/chat/completions", "include", "unsupported_value"
        )
    for index, tool in enumerate(request.tools or []):
        _check_tool(tool, f"tools[{index}]")
    form = None if request.text is None else request.text.format
    if form is not None and form.type == "json_schema" and (form.json_schema is None or not form.name):
        raise build_refusal(
            "text.format: json_schema needs a name and a schema", "text.format", "missing_required_parameter"
        )
    return request


def _check_tool(tool: Tool, where: str) -> None:
    if tool.type not in ("function", "custom", "namespace"):
        raise build_refusal(
            f"{where}: tools of type {tool.type!r} are run by OpenAI's servers and are not supported here; pass "
            "functions or custom tools",
            where,
            "unsupported_value",
        )
    if not tool.name:
        raise build_refusal(f"{where}.name: Field required", f"{where}.name", "missing_required_parameter")
    for index, inner in enumerate(tool.tools or []):
        _check_tool(inner, f"{where}.tools[{index}]")


def parse_item(kind: type[Item], values: JsonObject, where: str) -> Item:
    """Check an item of the input. Raises ApiError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = find_field_error(error, values)
        place = f"{where}.{wrong.place}"
        code = "missing_required_parameter" if wrong.is_missing else "invalid_type"
        raise build_refusal(f"{place}: {wrong.message}", place, code) from error


def extract_texts(content: Content, where: str) -> list[str]:
    """Return the texts of a content. Raises ApiError for other parts."""
    if isinstance(content, str):
        return [content]
    for index, part in enumerate(content):
        if isinstance(part, UnsupportedPart):
            raise build_unsupported_item_error(part.type, f"{where}.content[{index}]")
    return [part.text for part in content if not isinstance(part, UnsupportedPart)]


def build_unsupported_item_error(kind: object, where: str) -> ApiError:
    return build_refusal(
        f"{where}: {kind!r} is not supported: the served model is text-only", where, "unsupported_value"
    )
