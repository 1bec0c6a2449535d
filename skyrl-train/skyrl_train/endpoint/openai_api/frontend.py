"""The OpenAI API over any rollout engine: request JSON -> token ids -> engine -> response JSON. Independent of HTTP.

All requests use `generate` and `stream` of `InferenceEngineInterface`, so clients can use every feature of an engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_gym.valid_unicode import replace_lone_surrogates
from skyrl_train.endpoint.errors import (
    ApiError,
    ContextLengthExceeded,
    build_refusal,
    build_too_busy_error,
    convert_engine_error,
)
from skyrl_train.endpoint.openai_api.generation import EngineRequester, GeneratedChoice, Prompt
from skyrl_train.endpoint.openai_api.payloads import Envelope, Payload
from skyrl_train.endpoint.openai_api.prompts import ChatOptions, EndpointTemplate
from skyrl_train.endpoint.openai_api.replies import ChatReply, CompletionReply, Reply
from skyrl_train.endpoint.openai_api.response_format import build_constraint, get_thought_mode, parse_output_format
from skyrl_train.endpoint.openai_api.sampling import build_sampling_keywords, check_defaults, check_supported
from skyrl_train.endpoint.openai_api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from skyrl_train.endpoint.openai_api.sessions import SessionRequest, Sessions, resolve_session
from skyrl_train.endpoint.openai_api.streaming import stream_events
from skyrl_train.endpoint.openai_api.tool_calls import (
    ToolFormatName,
    ToolSyntax,
    convert_messages_for_template,
    resolve_tool_syntax,
)
from skyrl_train.endpoint.recorder import RequestRecorder
from skyrl_train.inference_engines.base import EngineInfo, InferenceEngineInterface
from skyrl_train.inference_engines.constraints import Constraint
from skyrl_train.types import ConversationType, JsonObject


class OpenAIFrontend:
    """Request handlers of the OpenAI API.

    Args:
        engine: one engine, or a client over many.
        tokenizer: tokenizer of the engines' model.
        model_names: names of the model for clients; the first is used in responses of other routes.
        chat_template, chat_template_kwargs: as `generator.chat_template` and `generator.chat_template_kwargs` say.
        tools: format of the model's tool calls.
        sampling_defaults: sampling keywords for requests that set none (temperature, top_p, top_k, min_p,
            repetition_penalty); others have the engines' defaults.
        request_timeout_seconds: deadline of a request.
        max_requests: maximum number of responses in flight, waiting ones included; further requests are rejected (429).
        recorder: receives every completed request that has a session.
    """

    def __init__(
        self,
        engine: InferenceEngineInterface,
        tokenizer: PreTrainedTokenizerBase,
        model_names: str | Sequence[str],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: JsonObject | None = None,
        tools: ToolFormatName = "auto",
        sampling_defaults: Mapping[str, Any] | None = None,
        request_timeout_seconds: float = 3600.0,
        max_requests: int = 16384,
        recorder: RequestRecorder | None = None,
    ):
        self.engine = engine
        self.model_names = [model_names] if isinstance(model_names, str) else list(model_names)
        self._template = EndpointTemplate(tokenizer, chat_template, chat_template_kwargs)
        self._sessions = Sessions(self._template, recorder)
        self._tools: ToolSyntax = resolve_tool_syntax(tools, self._template.source)
        self._sampling_defaults = check_defaults(sampling_defaults)
        self._asker = EngineRequester(engine, request_timeout_seconds)
        self._info: EngineInfo | None = None
        self._num_requests = 0
        self._max_requests = max_requests
        self._num_under_way = 0

    # Routes.

    async def chat(self, raw: bytes, session: str | None = None) -> Payload | AsyncIterator[str]:
        """Handle `POST /v1/chat/completions`. Returns the response, or its events for a stream. Raises ApiError."""
        return await self._generate_reply(*await self.open_chat(parse_request(ChatRequest, raw), raw, session))

    async def open_chat(
        self, request: ChatRequest, raw: bytes, session: str | None
    ) -> tuple[SessionRequest, ChatReply]:
        """Build the prompt of a chat request of any protocol. Raises ApiError.

        Args:
            raw: the original body; requests with equal bodies count as repeats.
        """
        self.check_model(request.model)
        session = resolve_session(session, request.session_id)
        messages, options, text = self._render_messages(request)
        ids = self._sessions.encode_prompt(session, messages, text, options)
        form = parse_output_format(request)
        thought = "none" if form.param is None else get_thought_mode(self._template, text)
        constraint = build_constraint(form, thought, self._template, self._tools)
        prompt = await self._build_prompt(
            request, ids, request.budget, "messages", session, constraint=constraint, constraint_param=form.param
        )
        reply = ChatReply(
            request,
            self._template,
            Envelope("chat.completion", request.model),
            [prompt],
            self._tools if options.tools else None,
            "none" if form.schema is None else thought,
        )
        asked = SessionRequest(session, raw, messages, None if request.continue_final_message else text)
        return asked, reply

    def count_tokens(self, request: ChatRequest) -> int:
        """Count the tokens of a chat request's prompt. Raises ApiError."""
        self.check_model(request.model)
        return len(self._template.encode(self._render_messages(request)[2]))

    async def growing(self, asked: SessionRequest, reply: ChatReply) -> AsyncGenerator[GeneratedChoice]:
        """Yield the choice of a chat request: successive states for a stream, else the complete one. The last has a
        stop reason and is recorded. Raises ApiError.
        """
        self._num_requests += 1
        async with self._count_answers(asked, reply):
            if reply.request.stream:
                async with contextlib.aclosing(self._asker.generate_growing(reply.prompts[0], 0)) as answers:
                    async for answer in answers:
                        if answer.stop_reason is not None:
                            self._sessions.keep(asked, reply, [answer])
                        yield answer
            else:
                [answer] = await self._asker.generate_choices(reply.prompts[0])
                self._sessions.keep(asked, reply, [answer])
                yield answer

    async def completion(self, raw: bytes, session: str | None = None) -> Payload | AsyncIterator[str]:
        """Handle `POST /v1/completions`, as `chat` does."""
        request = parse_request(CompletionRequest, raw)
        self.check_model(request.model)
        session = resolve_session(session, request.session_id)
        scores_only = request.max_tokens == 0 and request.echo
        if request.stream and request.echo and (request.logprobs is not None or scores_only):
            raise build_refusal("echo with logprobs or without generation cannot be streamed", "stream")
        prompts = []
        for number, given in enumerate(request.prompts):
            ids = self._encode_text(given) if isinstance(given, str) else given
            budget = 1 if scores_only else request.max_tokens
            index = number * request.num_choices
            prompts.append(await self._build_prompt(request, ids, budget, "prompt", session, index))
        reply = CompletionReply(request, self._template, Envelope("text_completion", request.model), prompts)
        return await self._generate_reply(
            SessionRequest(None if scores_only else session, raw), reply, bool(scores_only)
        )

    async def tokenize(self, raw: bytes) -> Payload:
        """Handle `POST /tokenize`: token ids of a text or of messages."""
        request = parse_request(TokenizeRequest, raw)
        if (request.prompt is None) == (request.messages is None):
            raise build_refusal("pass either prompt or messages", "prompt")
        if request.prompt is not None:
            ids = (
                self._encode_text(request.prompt)
                if request.add_special_tokens
                else self._template.encode(request.prompt)
            )
        else:
            assert request.messages is not None
            options = ChatOptions(
                tools=[tool.model_dump() for tool in request.tools or []] or None,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                kwargs=request.chat_template_kwargs or {},
            )
            ids = self._template.encode(self._template.render(convert_messages_for_template(request.messages), options))
        return {"tokens": ids, "count": len(ids), "max_model_len": (await self._describe_model()).max_model_len}

    async def detokenize(self, raw: bytes) -> Payload:
        """Handle `POST /detokenize`: text of token ids."""
        request = parse_request(DetokenizeRequest, raw)
        vocab_size = (await self._describe_model()).vocab_size
        if not all(0 <= token < vocab_size for token in request.tokens):
            raise build_refusal(f"tokens must be in the vocabulary, 0 to {vocab_size - 1}", "tokens")
        return {"prompt": self._template.decode(request.tokens, skip_special_tokens=False)}

    async def models(self) -> Payload:
        """Handle `GET /v1/models`, with the fields of OpenAI's and Anthropic's APIs."""
        info = await self._describe_model()
        models = [self._check_model(name, info) for name in self.model_names]
        pages = {"has_more": False, "first_id": self.model_names[0], "last_id": self.model_names[-1]}
        return {"object": "list", "data": models} | pages

    async def model(self, name: str) -> Payload:
        """`GET /v1/models/NAME`."""
        self.check_model(name)
        return self._check_model(name, await self._describe_model())

    async def check_health(self) -> None:
        """Raise ApiError if the engine is not healthy."""
        try:
            await self.engine.check_health()
        except Exception as error:  # any error means an unhealthy engine
            raise ApiError(503, "the engine is unhealthy; see the log", code="engine_unavailable") from error

    def take_metrics(self) -> dict[str, float]:
        """Return counts since the last call: `endpoint/requests`; `endpoint/exact_turns`, later turns of a session with
        earlier completions as sampled in their prompt; `endpoint/rendered_turns`, later turns rendered again because
        messages or template differ.
        """
        counts = {"endpoint/requests": float(self._num_requests)} | self._sessions.counts
        self._num_requests = 0
        self._sessions.counts = dict.fromkeys(self._sessions.counts, 0.0)
        return counts

    # Prompts.

    def _render_messages(self, request: ChatRequest) -> tuple[ConversationType, ChatOptions, str]:
        """Render a request's messages. Returns the messages and options for the template, and the rendered text."""
        messages = convert_messages_for_template(request.messages)
        options = ChatOptions(
            tools=request.tools_in_use,
            add_generation_prompt=not request.continue_final_message and request.add_generation_prompt is not False,
            continue_final_message=request.continue_final_message,
            kwargs=self._template.get_effort_kwargs(request.reasoning_effort) | (request.chat_template_kwargs or {}),
        )
        return messages, options, self._template.render(messages, options)

    def _encode_text(self, text: str) -> list[int]:
        """Encode a text with leading special tokens: the prompt of a text completion is a document."""
        return self._template.tokenizer(replace_lone_surrogates(text))["input_ids"]  # pyright: ignore[reportReturnType]

    async def _build_prompt(
        self,
        request: ChatRequest | CompletionRequest,
        ids: list[int],
        budget: int | None,
        param: str,
        session: str | None,
        first_index: int = 0,
        *,
        constraint: Constraint | None = None,
        constraint_param: str | None = None,
    ) -> Prompt:
        info = await self._describe_model()
        room = info.max_model_len - len(ids)
        if not ids:
            raise build_refusal(f"{param} has no tokens", param)
        if room < 1:
            self._sessions.record_full_context(session)
            raise ContextLengthExceeded(len(ids), info.max_model_len, param)
        rules, records = self._sessions.get_rules(session), self._sessions.records(session)
        params = build_sampling_keywords(request, budget, room, self._sampling_defaults, log_probs=records)
        params = rules.build_keywords(params)
        if isinstance(request, ChatRequest):
            params = self._template.turn_ends.add_stop_ids(params)
        check_supported(params, constraint, constraint_param, info.unsupported)
        if constraint is not None:
            params["constraint"] = constraint.to_keyword()
        return Prompt(
            ids=ids,
            params=params,
            num_choices=request.num_choices,
            seed=request.seed,
            first_index=first_index,
            session=session,
            constraint_param=constraint_param,
        )

    # Generation.

    async def _generate_reply(
        self, asked: SessionRequest, reply: Reply, scores_only: bool = False
    ) -> Payload | AsyncIterator[str]:
        self._num_requests += 1
        if reply.request.stream:
            return self._stream_reply(asked, reply)
        async with self._count_answers(asked, reply):
            answers = await self._generate_all(reply.prompts)
            self._sessions.keep(asked, reply, answers)
        if scores_only:
            for answer in answers:
                answer.truncate(0)
                answer.stop_reason = "length"
        return reply.build(answers)

    async def _stream_reply(self, asked: SessionRequest, reply: Reply) -> AsyncIterator[str]:
        async with self._count_answers(asked, reply):
            events = stream_events(self._asker, reply, lambda answers: self._sessions.keep(asked, reply, answers))
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event

    @contextlib.asynccontextmanager
    async def _count_answers(self, asked: SessionRequest, reply: Reply) -> AsyncIterator[None]:
        """Count responses in flight within the block, and admit them to their session. Raises ApiError if there are too
        many, or the session's budget is used up.
        """
        num_answers = reply.num_answers
        if self._num_under_way + num_answers > self._max_requests:
            raise build_too_busy_error(self._num_under_way, self._max_requests)
        self._num_under_way += num_answers
        try:
            async with self._sessions.admit(asked.session, reply, self._asker.timeout_seconds):
                yield
        finally:
            self._num_under_way -= num_answers

    async def _generate_all(self, prompts: Sequence[Prompt]) -> list[GeneratedChoice]:
        tasks = [asyncio.create_task(self._asker.generate_choices(prompt)) for prompt in prompts]
        try:
            return [answer for answers in await asyncio.gather(*tasks) for answer in answers]
        finally:
            for task in tasks:  # a failed choice or a disconnected client ends the others
                task.cancel()

    # Model.

    async def get_context_length(self) -> int:
        """Return the maximum number of tokens of prompt and response. Raises ApiError."""
        return (await self._describe_model()).max_model_len

    async def _describe_model(self) -> EngineInfo:
        if self._info is None:
            try:
                self._info = await self.engine.describe()
            except Exception as error:  # as in every call of an engine
                raise convert_engine_error(error) from error
        return self._info

    def check_model(self, name: str) -> None:
        """Raise ApiError if the model name is not served."""
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist; served models: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_model(self, name: str, info: EngineInfo) -> Payload:
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "skyrl", "max_model_len": info.max_model_len}
        anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return openai | anthropic | {"max_input_tokens": info.max_model_len, "max_tokens": info.max_model_len}
