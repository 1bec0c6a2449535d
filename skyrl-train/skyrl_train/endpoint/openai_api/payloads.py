"""Responses in OpenAI's JSON. Independent of engines and HTTP."""

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
"""Replacement of minus infinity, which JSON cannot represent."""


@dataclass(frozen=True)
class Written:
    """Response as a client sees it. `finish_reason` is unset (None) while it is generated."""

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

    def build(self, choices: list[Payload], answers: Sequence[GeneratedChoice], chunk: bool = False) -> Payload:
        """Build the object with these choices and the newest weight version of their tokens."""
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


def build_usage(num_prompt_tokens: int, answers: Sequence[GeneratedChoice]) -> dict[str, int]:
    """Count tokens. A prompt counts once for all its choices."""
    written = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": num_prompt_tokens + written,
    }


def build_assistant_message(written: Written, thought: str | None = None) -> Payload:
    """Build the message of a chat response.

    Args:
        thought: returned separately from the content, as vLLM's servers do; None: no thought, or it is in the content.
    """
    message: Payload = {"role": "assistant", "content": written.content or None, "refusal": None}
    if written.calls:
        message["tool_calls"] = [_call(call) for call in written.calls]
    else:
        message["content"] = written.content
    return message if thought is None else message | {"reasoning_content": thought}


def call_deltas(calls: Sequence[ToolCall]) -> list[Payload]:
    """Build the deltas of tool calls in a stream, one complete call each."""
    return [{"index": index} | _call(call) for index, call in enumerate(calls)]


def _call(call: ToolCall) -> Payload:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def build_chat_logprobs(
    template: EndpointTemplate, token_ids: Sequence[int], log_probs: Sequence[float], top: TopLogProbs | None
) -> Payload:
    """Build one entry per token, with the most likely tokens at its position if known."""

    def entry(token: int, log_prob: float) -> Payload:
        text = template.decode_token(token)
        return {"token": text, "logprob": _to_finite(log_prob), "bytes": list(text.encode())}

    content = []
    for place, (token, log_prob) in enumerate(zip(token_ids, log_probs, strict=True)):
        likeliest = [] if top is None else zip(top.ids[place].tolist(), top.log_probs[place].tolist(), strict=True)
        content.append(entry(token, log_prob) | {"top_logprobs": [entry(*each) for each in likeliest]})
    return {"content": content, "refusal": None}


def build_completion_logprobs(
    template: EndpointTemplate,
    token_ids: Sequence[int],
    log_probs: Sequence[float | None],
    offset: int,
    skip_special_tokens: bool,
    top: Sequence[tuple[Sequence[int], Sequence[float]] | None] | None,
) -> Payload:
    """Build parallel lists with one entry per token; `offset` is the position of the first in the text. The text omits
    special tokens if they are skipped; the token list always has them.

    Args:
        top: ids and log-probs of the most likely tokens at each position, None at the first token of a prompt; None:
            not requested.
    """
    tokens = [template.decode_token(token) for token in token_ids]
    offsets = []
    for token in token_ids:
        offsets.append(offset)
        offset += len(template.decode_token(token, skip_special_tokens))
    return {
        "tokens": tokens,
        "token_logprobs": [_to_finite(log_prob) for log_prob in log_probs],
        "top_logprobs": None
        if top is None
        else [_map_by_text(template, *place) for place in zip(token_ids, log_probs, top, strict=True)],
        "text_offset": offsets,
    }


def _map_by_text(
    template: EndpointTemplate, token: int, log_prob: float | None, top: tuple[Sequence[int], Sequence[float]] | None
) -> dict[str, float | None] | None:
    """Map token texts to log-probs, for the most likely tokens and the token itself. Of tokens with equal text the most
    likely one counts.
    """
    if top is None:
        return None
    likeliest = [*zip(*top, strict=True), (token, log_prob)]
    by_text: dict[str, float | None] = {}
    for each, value in likeliest:
        by_text.setdefault(template.decode_token(each), _to_finite(value))
    return by_text


def _to_finite(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(float(log_prob), LOWEST_LOG_PROB)


def format_server_sent_event(payload: Payload) -> str:
    """Format one server-sent event."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


END_OF_STREAM = "data: [DONE]\n\n"
