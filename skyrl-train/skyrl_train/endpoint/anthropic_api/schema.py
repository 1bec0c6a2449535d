"""Requests of Anthropic's Messages API as typed values.

As in `openai_api/schema.py`: an unsupported field that would change the response is rejected, one without effect
(`cache_control`, `metadata`) is accepted and ignored.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyrl_train.endpoint.errors import build_refusal
from skyrl_train.endpoint.openai_api.field_errors import find_field_error
from skyrl_train.endpoint.openai_api.schema import parse_json_object
from skyrl_train.types import JsonObject

MAX_MESSAGES = 100_000

Body = TypeVar("Body", bound=BaseModel)

_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "container": ((None,), "containers are not supported"),
    "mcp_servers": ((None, []), "pass the tools in the request"),
    "speed": ((None, "standard"), "remove the field"),
}
"""Field -> its values without effect, and advice for any other value."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Block(_Strict):
    cache_control: object = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: object = None


class ThinkingBlock(_Block):
    """Thought of an earlier response."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(_Block):
    """Tool call of an earlier response."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1, max_length=200)
    input: JsonObject
    caller: object = None
    toolset_name: str | None = None


class UnsupportedBlock(BaseModel):
    """Block of the API that a text model does not support."""

    model_config = ConfigDict(extra="allow")
    type: Literal[
        "image",
        "document",
        "search_result",
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "tool_reference",
        "browser_state",
        "container_upload",
        "mcp_tool_use",
        "mcp_tool_result",
    ]


class ToolResultBlock(_Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | list[Annotated[TextBlock | UnsupportedBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | UnsupportedBlock, Field(discriminator="type")
]


class AnthropicMessage(_Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def parts(self) -> list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | UnsupportedBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class InputSchema(BaseModel):
    """JSON schema of a tool's input."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["object"]


class AnthropicTool(BaseModel):
    """Tool defined by the client. Tools that Anthropic's servers define or run have another type."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    strict: bool | None = None
    input_schema: InputSchema | None = None


class ToolChoice(_Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingSettings(_Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputSettings(_Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(_Strict):
    """`POST /v1/messages/count_tokens`."""

    model: str = Field(min_length=1)
    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None

    # Taken and not read.
    cache_control: object = None
    context_management: object = (
        None  # edits of long conversations: Anthropic's servers support them, this one does not
    )
    user_profile_id: str | None = None
    workspace_id: str | None = None

    # Accepted only with values that have no effect.
    container: object = None
    mcp_servers: object = None
    speed: str | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    # Taken and not read.
    metadata: JsonObject | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: object = None


def parse_request(kind: type[Body], raw: bytes) -> Body:
    """Parse a request's body. Raises ApiError with a message that begins with the field, as in Anthropic's API."""
    values = parse_json_object(raw)
    try:
        request = kind.model_validate(values)
    except ValidationError as error:
        wrong = find_field_error(error, values)
        raise build_refusal(f"{wrong.place}: {wrong.message}") from error
    for name, (neutral, instead) in _NEUTRAL.items():
        if values.get(name) not in neutral:
            raise build_refusal(f"{name}: not supported here; {instead}")
    if isinstance(request, CountTokensRequest):
        _check_between_fields(request)
    return request


def _check_between_fields(request: CountTokensRequest) -> None:
    if not request.messages:
        raise build_refusal("messages: at least one message is required")
    if len(request.messages) > MAX_MESSAGES:
        raise build_refusal(f"messages: at most {MAX_MESSAGES} messages are allowed; got {len(request.messages)}")
    _check_tools(request)
    if isinstance(request, MessagesRequest):
        _check_generation(request)


def _check_tools(request: CountTokensRequest) -> None:
    names = [tool.name for tool in request.tools or []]
    for index, tool in enumerate(request.tools or []):
        if tool.type not in (None, "custom"):
            raise build_refusal(
                f"tools.{index}: tools of type {tool.type!r} are defined or run by Anthropic's servers and are not "
                "supported here; pass a tool with a name and an input_schema"
            )
        if tool.input_schema is None:
            raise build_refusal(f"tools.{index}.custom.input_schema: Field required")
    if len(set(names)) < len(names):
        raise build_refusal("tools: Tool names must be unique.")
    choice = request.tool_choice
    if choice is None:
        return
    if (choice.type == "tool") != (choice.name is not None):
        raise build_refusal(f"tool_choice.{choice.type}.name: requires a name if and only if type is 'tool'")
    if choice.type == "none":
        return
    if not names:
        raise build_refusal("tool_choice: may only be specified while providing tools")
    if choice.name is not None and choice.name not in names:
        raise build_refusal(f"tool_choice: Tool '{choice.name}' not found in provided tools")


def _check_generation(request: MessagesRequest) -> None:
    for index, text in enumerate(request.stop_sequences or []):
        if not text.strip():
            raise build_refusal(f"stop_sequences.{index}: each stop sequence must contain non-whitespace")
    thinking = request.thinking
    if thinking is None:
        return
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise build_refusal(
            f"thinking.{thinking.type}.budget_tokens: allowed only with type 'enabled', where it is required"
        )
    if thinking.budget_tokens is not None and thinking.budget_tokens < 1024:
        raise build_refusal("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
    if thinking.budget_tokens is not None and thinking.budget_tokens >= request.max_tokens:
        raise build_refusal("`max_tokens` must be greater than `thinking.budget_tokens`")
