"""Sampling for OpenAI clients: `base_url` is `{server}/oai/api/v1`, `model` a sampler path (`tinker://…`) or the base
model's name. No streaming."""

import asyncio
import secrets
import time
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationError

from tx.errors import RequestError
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.responses import Problem, ResponseBody
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.service.results import StoredResult, TryAgain
from tx.tinker.texts import Texts
from tx.tinker.types import SampleOutput, Sequence
from tx.tinker.wire import schemas
from tx.tinker.wire.codec import decode_sample_output

router = APIRouter(prefix="/oai/api/v1", tags=["OpenAI-compatible sampling"])

POLL_SECONDS = 30.0
DEADLINE_SECONDS = 3600.0
MAX_ANSWERS = 1024
"""Prompts times `n` of one request: each prompt is a sample of its own for the limits of a tenant."""
_LATE: dict[int, Any] = {503: {"model": Problem, "description": "No response in time, or the server is restarting"}}


class _SamplingBody(schemas.Body):
    model: schemas.Name
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    seed: schemas.Int64 | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    """Not recorded."""


class CompletionBody(_SamplingBody):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: schemas.Index | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=0)
    """0: only the log-probs of the chosen tokens; others are not available."""


class ChatMessage(schemas.LenientBody):
    role: schemas.Name
    content: str | None = None


class ChatCompletionBody(_SamplingBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: schemas.Index | None = None
    max_completion_tokens: schemas.Index | None = None
    logprobs: bool = False


class Completion(ResponseBody):
    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, int]


@router.post("/completions", **describe_route(Completion, CompletionBody, also=_LATE))
async def completions(request: Request) -> Response:
    asked = await read_json(request, CompletionBody)
    texts: Texts = request.app.state.texts
    prompts = await asyncio.to_thread(_parse_prompts, asked.prompt, texts)
    if len(prompts) * asked.n > MAX_ANSWERS:
        raise RequestError(
            f"one request may ask for at most {MAX_ANSWERS} completions (prompts x n); got {len(prompts)} prompts "
            f"with n={asked.n}. Split them over several requests"
        )
    outputs = await asyncio.gather(*(_sample(request, asked, prompt, asked.max_tokens) for prompt in prompts))
    choices = []
    for output in outputs:
        for sequence in output.sequences:
            choice = _build_choice(len(choices), sequence, asked.stop, texts)
            if asked.logprobs is not None:
                choice["logprobs"] = {
                    "tokens": texts.decode_each(sequence.tokens),
                    "token_logprobs": sequence.logprobs,
                    "top_logprobs": None,
                }
            choices.append(choice)
    return _build_response("text_completion", asked.model, choices, prompts, outputs)


@router.post("/chat/completions", **describe_route(Completion, ChatCompletionBody, also=_LATE))
async def chat_completions(request: Request) -> Response:
    asked = await read_json(request, ChatCompletionBody)
    texts: Texts = request.app.state.texts
    messages = [message.model_dump() for message in asked.messages]
    prompt = await asyncio.to_thread(texts.encode_chat, messages)
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    output = await _sample(request, asked, prompt, most)
    choices = []
    for sequence in output.sequences:
        choice = _build_choice(len(choices), sequence, asked.stop, texts)
        choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        if asked.logprobs:
            pairs = zip(texts.decode_each(sequence.tokens), sequence.logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token": t, "logprob": p, "top_logprobs": []} for t, p in pairs]}
        choices.append(choice)
    return _build_response("chat.completion", asked.model, choices, [prompt], [output])


@router.get("/models", **describe_route(ResponseBody))
async def list_models(request: Request) -> Response:
    """List the base model's names; sampler paths work without being listed."""
    names = request.app.state.config.served_names
    return to_json_response(
        {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "tx"} for name in names]}
    )


def _parse_prompts(prompt: Any, texts: Texts) -> list[list[int]]:
    """Parse one or several prompts, as text or tokens."""
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return [texts.encode(one) if isinstance(one, str) else one for one in (prompt if several else [prompt])]


async def _sample(request: Request, asked: _SamplingBody, prompt: list[int], max_tokens: int | None) -> SampleOutput:
    try:
        command = _build_request(asked, prompt, max_tokens)
    except ValidationError as error:
        raise schemas.to_request_error(error) from None
    accepted = await get_service(request).sampling.asample(get_tenant(request), command)
    result = await _wait_for_result(request, str(accepted["request_id"]))
    if result.error is not None:
        raise RequestError(result.error, 400 if result.category == "user" else 500)
    return decode_sample_output(result.body or b"")


def _build_request(asked: _SamplingBody, prompt: list[int], max_tokens: int | None) -> schemas.AsampleRequest:
    params = schemas.SamplingParams(
        max_tokens=max_tokens,
        seed=asked.seed,
        stop=asked.stop,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
    )
    is_path = asked.model.startswith("tinker://")
    return schemas.AsampleRequest(
        prompt=schemas.ModelInput(chunks=[schemas.Chunk(tokens=prompt)]),
        sampling_params=params,
        num_samples=asked.n,
        model_path=asked.model if is_path else None,
        base_model=None if is_path else asked.model,
    )


async def _wait_for_result(request: Request, request_id: str) -> StoredResult:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        waiting = get_service(request).futures.retrieve(get_tenant(request), request_id, POLL_SECONDS)
        result = await request.app.state.polls.wait_for(waiting)
        if result is None:
            raise RequestError("the server is restarting; retry", 503)
        if not isinstance(result, TryAgain):
            return result
    raise RequestError(f"no response within {DEADLINE_SECONDS:.0f} s", 503)


def _build_choice(index: int, sequence: Sequence, stop: str | list[str] | None, texts: Texts) -> dict[str, object]:
    """Build a choice. Unlike in the Tinker protocol, the stop text is not part of the completion."""
    text = texts.decode(sequence.tokens)
    for ending in [stop] if isinstance(stop, str) else stop or []:
        if ending:
            text = text.split(ending, 1)[0]
    return {"index": index, "text": text, "finish_reason": sequence.stop_reason, "logprobs": None}


def _build_response(
    kind: str, model: str, choices: list[dict[str, object]], prompts: list[list[int]], outputs: list[SampleOutput]
) -> Response:
    asked = sum(len(prompt) for prompt in prompts)
    written = sum(len(sequence.tokens) for output in outputs for sequence in output.sequences)
    return to_json_response(
        {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written},
        }
    )
