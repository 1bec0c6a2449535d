"""The OpenAI API over any rollout engine: request JSON -> token ids -> engine -> answer JSON. Knows no HTTP.

Everything goes through `InferenceEngineInterface.generate`, so what an engine can do, every client can ask for.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import EngineInfo, InferenceEngineInterface
from skyrl_train.inference_engines.native.requests import SamplingParams
from skyrl_train.inference_engines.openai_api.errors import (
    ApiError,
    context_length_exceeded,
    error_of_engine,
    refused,
)
from skyrl_train.inference_engines.openai_api.generation import Answer, Asker, Prompt
from skyrl_train.inference_engines.openai_api.payloads import Envelope, assistant_message
from skyrl_train.inference_engines.openai_api.prompts import ChatOptions, ChatTemplate, ConversationMemory, Said
from skyrl_train.inference_engines.openai_api.recorder import RecordedTurn, RequestRecorder
from skyrl_train.inference_engines.openai_api.replies import ChatReply, CompletionReply, Reply
from skyrl_train.inference_engines.openai_api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    parsed,
)
from skyrl_train.inference_engines.openai_api.streaming import stream
from skyrl_train.inference_engines.openai_api.tool_calls import ToolFormatName, messages_for_template, tool_format
from skyrl_train.types import ConversationType

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
)
"""Sampling keywords that a request names as the engines do."""

Session = str | int | None
Payload = dict[str, Any]


class OpenAIFrontend:
    """Answers the requests of the OpenAI API.

    Args:
        engine: one engine, or a client over many.
        tokenizer: of the engines' model.
        model_names: what clients call the model; the first stands in answers to others.
        chat_template, chat_template_kwargs: as `generator.chat_template` and `generator.chat_template_kwargs` say.
        tools: how the model writes tool calls.
        sampling_defaults: sampling keywords where a request names none (temperature, top_p, top_k, min_p,
            repetition_penalty); what is not here is the engines' default.
        request_timeout_seconds: the longest that a request may take.
        recorder: gets every answered request that has a session.
    """

    def __init__(
        self,
        engine: InferenceEngineInterface,
        tokenizer: PreTrainedTokenizerBase,
        model_names: str | Sequence[str],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: ToolFormatName = "auto",
        sampling_defaults: Mapping[str, Any] | None = None,
        request_timeout_seconds: float = 3600.0,
        recorder: RequestRecorder | None = None,
    ):
        self.engine = engine
        self.model_names = [model_names] if isinstance(model_names, str) else list(model_names)
        self.recorder = recorder
        self._template = ChatTemplate(tokenizer, chat_template, chat_template_kwargs)
        self._memory = ConversationMemory(self._template)
        self._tools = tool_format(tools, self._template.source)
        self._sampling_defaults = dict(sampling_defaults or {})
        if unknown := sorted(set(self._sampling_defaults) - set(_SAMPLING)):
            raise ValueError(f"sampling_defaults may hold {', '.join(_SAMPLING)}; got {', '.join(unknown)}")
        self._asker = Asker(engine, request_timeout_seconds)
        self._info: EngineInfo | None = None
        self._metrics = {"endpoint/requests": 0.0, "endpoint/exact_turns": 0.0, "endpoint/rendered_turns": 0.0}

    # What the server calls.

    async def chat(self, raw: bytes, session: Session = None) -> Payload | AsyncIterator[str]:
        """`POST /v1/chat/completions`: the answer, or its events if the request asks for a stream. Raises ApiError."""
        request = parsed(ChatRequest, raw)
        self._check_model(request.model)
        session = _one_session(session, request.session_id)
        messages = messages_for_template(request.messages)
        options = ChatOptions(
            tools=request.tools_in_use,
            add_generation_prompt=not request.continue_final_message and request.add_generation_prompt is not False,
            continue_final_message=request.continue_final_message,
            kwargs=request.chat_template_kwargs or {},
        )
        text, ids = self._chat_prompt(messages, options, session)
        prompt = await self._prompt(request, ids, request.budget, "messages", session)
        reply = ChatReply(
            request,
            self._template,
            Envelope("chat.completion", request.model),
            [prompt],
            self._tools if options.tools else None,
        )
        return await self._answered(reply, raw, session, messages, None if request.continue_final_message else text)

    async def completion(self, raw: bytes, session: Session = None) -> Payload | AsyncIterator[str]:
        """`POST /v1/completions`. As `chat`."""
        request = parsed(CompletionRequest, raw)
        self._check_model(request.model)
        session = _one_session(session, request.session_id)
        scores_only = request.max_tokens == 0 and request.echo
        if request.stream and request.echo and request.logprobs is not None:
            raise refused("echo with logprobs cannot be streamed", "stream")
        prompts = []
        for number, given in enumerate(request.prompts):
            ids = self._encoded(given) if isinstance(given, str) else given
            budget = 1 if scores_only else request.max_tokens
            index = number * request.num_choices
            prompts.append(await self._prompt(request, ids, budget, "prompt", session, index))
        reply = CompletionReply(request, self._template, Envelope("text_completion", request.model), prompts)
        return await self._answered(reply, raw, session, None, None, scores_only=bool(scores_only))

    async def tokenize(self, raw: bytes) -> Payload:
        """`POST /tokenize`: the ids of a text or of messages."""
        request = parsed(TokenizeRequest, raw)
        if (request.prompt is None) == (request.messages is None):
            raise refused("give either prompt or messages", "prompt")
        if request.prompt is not None:
            ids = self._encoded(request.prompt) if request.add_special_tokens else self._template.encode(request.prompt)
        else:
            assert request.messages is not None
            options = ChatOptions(
                tools=[tool.model_dump() for tool in request.tools or []] or None,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                kwargs=request.chat_template_kwargs or {},
            )
            ids = self._template.encode(self._template.text(messages_for_template(request.messages), options))
        return {"tokens": ids, "count": len(ids), "max_model_len": (await self._described()).max_model_len}

    async def detokenize(self, raw: bytes) -> Payload:
        """`POST /detokenize`: the text of some ids."""
        request = parsed(DetokenizeRequest, raw)
        vocab_size = (await self._described()).vocab_size
        if not all(0 <= token < vocab_size for token in request.tokens):
            raise refused(f"tokens must lie in the vocabulary, 0 to {vocab_size - 1}", "tokens")
        return {"prompt": self._template.decode(request.tokens, skip_special_tokens=False)}

    async def models(self) -> Payload:
        """`GET /v1/models`."""
        info = await self._described()
        return {"object": "list", "data": [self._model(name, info) for name in self.model_names]}

    async def model(self, name: str) -> Payload:
        """`GET /v1/models/NAME`."""
        self._check_model(name)
        return self._model(name, await self._described())

    async def check_health(self) -> None:
        """Raises ApiError if the engine is not well."""
        try:
            await self.engine.check_health()
        except Exception as error:  # whatever it is, the engine is not well
            raise ApiError(503, "the engine is not well; the log says more", code="engine_unavailable") from error

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call: `endpoint/requests`; `endpoint/exact_turns`, later turns of a session whose
        prompt holds the earlier answers as they were drawn; `endpoint/rendered_turns`, those whose messages or template
        say otherwise, so that they were rendered anew."""
        metrics, self._metrics = self._metrics, dict.fromkeys(self._metrics, 0.0)
        return metrics

    # From messages and texts to prompts.

    def _chat_prompt(self, messages: ConversationType, options: ChatOptions, session: Session) -> tuple[str, list[int]]:
        text = self._template.text(messages, options)
        if session is not None and self._memory.may_know(session, messages):
            ids = self._memory.recall(session, messages, text, options)
            self._metrics["endpoint/rendered_turns" if ids is None else "endpoint/exact_turns"] += 1
            if ids is not None:
                return text, ids
        return text, self._template.encode(text)

    def _encoded(self, text: str) -> list[int]:
        """With what the tokenizer puts before a text: a completion's prompt is a document."""
        return self._template.tokenizer(text)["input_ids"]  # pyright: ignore[reportReturnType]

    async def _prompt(
        self,
        request: ChatRequest | CompletionRequest,
        ids: list[int],
        budget: int | None,
        param: str,
        session: Session,
        first_index: int = 0,
    ) -> Prompt:
        info = await self._described()
        room = info.max_model_len - len(ids)
        if not ids:
            raise refused(f"{param} has no tokens", param)
        if room < 1:
            raise context_length_exceeded(len(ids), info.max_model_len, param)
        if budget is not None and budget < 1:
            raise refused(f"max_tokens must be at least 1; got {budget}", "max_tokens")
        params = dict(self._sampling_defaults)
        params |= {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
        params["max_tokens"] = room if budget is None else min(budget, room)
        if params.get("min_tokens"):
            params["min_tokens"] = min(params["min_tokens"], room)
        if request.stop_texts:
            params["stop"] = request.stop_texts
        wants_log_probs = request.logprobs is not None and request.logprobs is not False
        records = self.recorder is not None and session is not None
        params["logprobs"] = 0 if wants_log_probs or records else None
        if isinstance(request, CompletionRequest) and request.echo and wants_log_probs:
            params["prompt_logprobs"] = 0
        try:
            SamplingParams.from_dict(params)
        except ValueError as error:
            raise refused(str(error)) from error
        return Prompt(
            ids=ids,
            params=params,
            num_choices=request.num_choices,
            seed=request.seed,
            first_index=first_index,
            session=session,
            stop=request.stop_texts,
        )

    # From prompts to answers.

    async def _answered(
        self,
        reply: Reply,
        raw: bytes,
        session: Session,
        messages: ConversationType | None,
        text: str | None,
        scores_only: bool = False,
    ) -> Payload | AsyncIterator[str]:
        self._metrics["endpoint/requests"] += 1
        started = time.monotonic()

        async def finished(answers: list[Answer]) -> None:
            if session is not None and not scores_only:
                self._keep(reply, raw, session, messages, text, answers, started)

        if reply.request.stream:
            return stream(self._asker, reply, finished)
        answers = await self._all_answers(reply.prompts)
        if scores_only:
            for answer in answers:
                answer.cut(0)
                answer.stop_reason = "length"
        await finished(answers)
        return reply.whole(answers)

    async def _all_answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        tasks = [asyncio.create_task(self._asker.whole(prompt)) for prompt in prompts]
        try:
            return [answer for answers in await asyncio.gather(*tasks) for answer in answers]
        finally:
            for task in tasks:  # one that failed, or a client that went away, ends the others
                task.cancel()

    def _keep(
        self,
        reply: Reply,
        raw: bytes,
        session: str | int,
        messages: ConversationType | None,
        text: str | None,
        answers: list[Answer],
        started: float,
    ) -> None:
        """Remembers a session's answers, for the prompts to come and for the recorder."""
        said = [_as_said(reply, answer) if messages is not None else None for answer in answers]
        if messages is not None and text is not None:
            self._memory.remember(
                session,
                len(messages),
                text,
                reply.prompts[0].ids,
                [
                    (Said.of(message), answer.token_ids)
                    for message, answer in zip(said, answers, strict=True)
                    if message
                ],
            )
        if self.recorder is None:
            return
        request, now = _digest(raw), time.monotonic()
        turns = []
        for index, (message, answer) in enumerate(zip(said, answers, strict=True)):
            prompt = reply.prompt_of(index)
            assert answer.log_probs is not None and answer.stop_reason is not None, "asked for, and complete"
            turns.append(
                RecordedTurn(
                    prompt_ids=prompt.ids,
                    response_ids=answer.token_ids,
                    log_probs=answer.log_probs,
                    weight_versions=answer.weight_versions,
                    stop_reason=answer.stop_reason,
                    temperature=prompt.params.get("temperature", 1.0),
                    messages=messages,
                    answer=message,
                    request=request,
                    started=started,
                    finished=now,
                )
            )
        self.recorder.record(session, turns)

    # Of the model.

    async def _described(self) -> EngineInfo:
        if self._info is None:
            try:
                self._info = await self.engine.describe()
            except Exception as error:  # as in every call of an engine
                raise error_of_engine(error) from error
        return self._info

    def _check_model(self, name: str) -> None:
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist here; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model(self, name: str, info: EngineInfo) -> Payload:
        return {"id": name, "object": "model", "created": 0, "owned_by": "skyrl", "max_model_len": info.max_model_len}


def _one_session(header: Session, body: Session) -> Session:
    if header is not None and body is not None and str(header) != str(body):
        raise refused(f"X-Session-ID {header!r} and session_id {body!r} differ; give one of them", "session_id")
    session = body if header is None else header
    return None if session is None else str(session)


def _as_said(reply: Reply, answer: Answer) -> dict[str, Any]:
    """The message that a client was given, as it comes back in the next request."""
    return messages_for_template([Message.model_validate(assistant_message(reply.read(answer)))])[0]


def _digest(raw: bytes) -> str:
    """Equal for bodies that say the same."""
    return hashlib.sha256(json.dumps(json.loads(raw), sort_keys=True).encode()).hexdigest()
