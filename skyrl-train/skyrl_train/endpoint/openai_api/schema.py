"""Requests of the OpenAI API as typed values. Other fields are rejected.

An unsupported field that would change the response is rejected unless it has its neutral value; a field without effect
(`user`, `metadata`) is accepted and ignored. Extensions of OpenAI's API follow vLLM's servers.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from skyrl_gym.suggestions import did_you_mean
from skyrl_train.endpoint.errors import ApiError, build_refusal
from skyrl_train.types import JsonObject

Body = TypeVar("Body", bound=BaseModel)

MAX_CHOICES = 128
MAX_ANSWERS = 2048
"""Maximum of prompts x choices in one request."""

MAX_TOP_LOGPROBS = 20

_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "functions": ((None,), "use tools"),
    "function_call": ((None,), "use tool_choice"),
    "modalities": ((None, ["text"]), "only text output is supported"),
    "audio": ((None,), "only text output is supported"),
    "web_search_options": ((None,), "remove the field"),
    "moderation": ((None,), "remove the field"),
    "verbosity": ((None,), "remove the field"),
    "suffix": ((None, ""), "remove the field"),
}
"""Field -> its values without effect, and advice for any other value."""


Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A number of tokens, an id, or -1. Larger values are mistakes."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Request(BaseModel):
    """Common fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool = False
    return_token_ids: bool | None = None
    session_id: str | int | None = None

    # Taken and not read.
    user: str | None = None
    metadata: dict[str, object] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, object] | None = None
    prompt_cache_retention: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class FunctionCall(BaseModel):
    """Function call in an assistant message."""

    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    arguments: str | JsonObject = "{}"


class ToolCallMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message. Further fields (`reasoning_content`, `refusal`) are passed unchanged to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonObject] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None


class FunctionTool(BaseModel):
    """Function that may be called; its schema is passed unchanged to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]
    function: JsonObject


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: object = None
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None

    prediction: object = None  # accepted and ignored: a latency hint for OpenAI's servers

    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    parallel_tool_calls: bool | None = None
    response_format: object = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    # Accepted only with values that have no effect.
    functions: object = None
    function_call: object = None
    modalities: list[str] | None = None
    audio: object = None
    web_search_options: object = None
    moderation: object = None
    verbosity: str | None = None

    @property
    def num_top(self) -> int | None:
        """Number of most likely tokens to return with each token's log-prob; None: no log-probs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def budget(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tools_in_use(self) -> list[dict[str, object]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump() for tool in self.tools]


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[Count] | list[list[Count]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Count | None = None
    suffix: str | None = None

    @property
    def num_top(self) -> int | None:
        """Number of most likely tokens to return at each position; None: no log-probs."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a text, or the messages of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: list[Count]


def parse_request(kind: type[Body], raw: bytes) -> Body:
    """Parse a request's body.

    Raises:
        ApiError: not a JSON object, or a field is unknown, has a wrong type or an unsupported value.
    """
    return parse_fields(kind, parse_json_object(raw))


def parse_json_object(raw: bytes) -> JsonObject:
    """Parse a body that must be a JSON object. Raises ApiError."""
    try:
        # Unlike `json`, rejects invalid Unicode (lone surrogates) and more than 200 levels of nesting.
        values = from_json(raw)
    except ValueError as error:
        raise build_refusal(f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise build_refusal(f"the body must be a JSON object; got {type(values).__name__}")
    return values


def parse_fields(kind: type[Body], values: JsonObject) -> Body:
    """Build a request from its fields. Raises ApiError like `parse_request`."""
    request = validate_fields(kind, values)
    for name, (neutral, instead) in _NEUTRAL.items():
        if values.get(name) not in neutral:
            raise build_refusal(f"{name}={values[name]!r} is not supported; {instead}", name, "unsupported_value")
    _check_between_fields(request)
    return request


def validate_fields(kind: type[Body], values: JsonObject) -> Body:
    """Check names and types of fields. Raises ApiError."""
    for name in values:
        if name not in kind.model_fields:
            raise _build_unknown_field_error(name, kind)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _build_invalid_field_error(error) from error


def _check_between_fields(request: BaseModel) -> None:
    if isinstance(request, ChatRequest):
        if not request.messages:
            raise build_refusal("messages must contain at least one message", "messages")
        budgets = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(budgets) > 1:
            raise build_refusal(
                f"max_tokens={request.max_tokens} and max_completion_tokens={request.max_completion_tokens} set the "
                "same limit; pass one of them",
                "max_tokens",
            )
        if request.top_logprobs and not request.logprobs:
            raise build_refusal("top_logprobs requires logprobs=true", "top_logprobs")
        if request.continue_final_message and request.add_generation_prompt:
            raise build_refusal(
                "continue_final_message=true continues the last message, add_generation_prompt=true starts a new "
                "one; pass one of them",
                "continue_final_message",
            )
    if isinstance(request, CompletionRequest):
        if not request.prompts or not all(request.prompts):
            raise build_refusal("prompt must not be empty", "prompt")
        if len(request.prompts) * request.num_choices > MAX_ANSWERS:
            raise build_refusal(
                f"one request may ask for at most {MAX_ANSWERS} completions (prompts x n); got {len(request.prompts)} "
                f"prompts with n={request.num_choices}. Split them over several requests",
                "prompt",
                "too_many_answers",
            )
        if request.best_of not in (None, request.num_choices):
            raise build_refusal(
                f"best_of={request.best_of} is not supported; use n and select in the client", "best_of"
            )
    if isinstance(request, _Request) and request.stream_options is not None and not request.stream:
        raise build_refusal("stream_options requires stream=true", "stream_options")


def _build_unknown_field_error(name: str, kind: type[BaseModel]) -> ApiError:
    hint = did_you_mean(name, sorted(kind.model_fields))
    return build_refusal(f"unknown field {name}; {hint}", name, "unknown_parameter")


def _build_invalid_field_error(error: ValidationError) -> ApiError:
    """Build the error of the first invalid field; later ones may be consequences."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_type"
    got = "" if first["type"] == "missing" else f"; got {_shorten(first['input'])}"
    return build_refusal(f"{where}: {first['msg']}{got}", str(first["loc"][0]) if first["loc"] else None, code)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
