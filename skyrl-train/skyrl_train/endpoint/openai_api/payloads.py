"""Answers in OpenAI's JSON. Knows no engine and no HTTP."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyrl_gym.chat.tool_calls import ToolCall
from skyrl_train.endpoint.openai_api.generation import GeneratedChoice
from skyrl_train.endpoint.openai_api.prompts import EndpointTemplate
from skyrl_train.inference_engines.base import TopLogProbs
from skyrl_train.types import JsonObject

Payload = JsonObject
"""JSON object."""

LOWEST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class Written:
    """An answer as a client sees it. `finish_reason` is None while it grows."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Envelope:
    """Fields common to all responses to one request."""

    kind: str
    """`chat.completion`, `text_completion`."""
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[Payload], answers: Sequence[GeneratedChoice], chunk: bool = False) -> Payload:
        """The object with these choices, and the newest weights that wrote one of these answers."""
        version = max((version for answer in answers for version in answer.weight_versions), default=None)
        chat = self.kind == "chat.completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.id}",
            "object": "chat.completion.chunk" if chat and chunk else self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None if version is None else f"weights-{version}",
            "weight_version": version,
            "choices": choices,
        }


def usage(num_prompt_tokens: int, answers: Sequence[GeneratedChoice]) -> dict[str, int]:
    """The numbers of tokens; a prompt counts once, however many choices it has."""
    written = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": num_prompt_tokens + written,
    }


def assistant_message(written: Written, thought: str | None = None) -> Payload:
    """A chat answer.

    Args:
        thought: returned apart from the content, as vLLM's servers do; None: there is none, or it is in the content.
    """
    message: Payload = {"role": "assistant", "content": written.content or None, "refusal": None}
    if written.calls:
        message["tool_calls"] = [_call(call) for call in written.calls]
    else:
        message["content"] = written.content
    return message if thought is None else message | {"reasoning_content": thought}


def call_deltas(calls: Sequence[ToolCall]) -> list[Payload]:
    """Tool calls in a streamed answer: each whole, in one piece."""
    return [{"index": index} | _call(call) for index, call in enumerate(calls)]


def _call(call: ToolCall) -> Payload:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def chat_logprobs(
    template: EndpointTemplate, token_ids: Sequence[int], log_probs: Sequence[float], top: TopLogProbs | None
) -> Payload:
    """One entry a token, with those of the likeliest tokens in its place if they are known."""

    def entry(token: int, log_prob: float) -> Payload:
        text = template.text_of(token)
        return {"token": text, "logprob": _finite(log_prob), "bytes": list(text.encode())}

    content = []
    for place, (token, log_prob) in enumerate(zip(token_ids, log_probs, strict=True)):
        likeliest = [] if top is None else zip(top.ids[place].tolist(), top.log_probs[place].tolist(), strict=True)
        content.append(entry(token, log_prob) | {"top_logprobs": [entry(*each) for each in likeliest]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    template: EndpointTemplate,
    token_ids: Sequence[int],
    log_probs: Sequence[float | None],
    offset: int,
    skip_special_tokens: bool,
    top: Sequence[tuple[Sequence[int], Sequence[float]] | None] | None,
) -> Payload:
    """Parallel lists, one entry a token; `offset` is where in the text the first begins. The text is without special
    tokens if they are skipped; the list of tokens has them always.

    Args:
        top: ids and log-probs of the likeliest tokens in each place, None at the first token of a prompt; None: not
            asked for.
    """
    tokens = [template.text_of(token) for token in token_ids]
    offsets = []
    for token in token_ids:
        offsets.append(offset)
        offset += len(template.text_of(token, skip_special_tokens))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(log_prob) for log_prob in log_probs],
        "top_logprobs": None
        if top is None
        else [_by_text(template, *place) for place in zip(token_ids, log_probs, top, strict=True)],
        "text_offset": offsets,
    }


def _by_text(
    template: EndpointTemplate, token: int, log_prob: float | None, top: tuple[Sequence[int], Sequence[float]] | None
) -> dict[str, float | None] | None:
    """Return the log-probs of the likeliest tokens and of the token itself by their texts; of tokens with one text the
    likeliest counts."""
    if top is None:
        return None
    likeliest = [*zip(*top, strict=True), (token, log_prob)]
    by_text: dict[str, float | None] = {}
    for each, value in likeliest:
        by_text.setdefault(template.text_of(each), _finite(value))
    return by_text


def _finite(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(float(log_prob), LOWEST_LOG_PROB)


def server_sent(payload: Payload) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


END_OF_STREAM = "data: [DONE]\n\n"
