"""Model with scripted completions. It reads and writes tokens like a real model."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_agent.types import JsonObject, MetaInfo, SamplingParams

Script = Callable[[str, int], str] | Sequence[str]
"""(the text the model was asked with, turn) -> its answer; or the answers in order, the last one for ever."""


@dataclass
class Request:
    """Request to the model."""

    request_id: str
    turn: int
    input_ids: list[int]
    prompt: str
    """`input_ids` as text, special tokens included."""
    sampling_params: JsonObject


@dataclass
class ScriptedModel:
    """An `InferBackend`. Turns are counted by `request_id`.

    Args:
        logprob: of each token it writes; None: it tells none.
        tells_ids: False: as a server that returns text alone.
        seconds: duration of each completion.
    """

    tokenizer: Any
    script: Script
    logprob: float | None = -0.5
    tells_ids: bool = True
    seconds: float = 0.0
    requests: list[Request] = field(default_factory=list)
    _turns: Counter[str] = field(default_factory=Counter)

    async def async_generate_ids(
        self, *, input_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> tuple[str, MetaInfo]:
        turn = self._turns[request_id]
        self._turns[request_id] += 1
        prompt = self.tokenizer.decode(input_ids, skip_special_tokens=False)
        self.requests.append(Request(request_id, turn, list(input_ids), prompt, dict(sampling_params)))
        await asyncio.sleep(self.seconds)
        answer = self.script(prompt, turn) if callable(self.script) else self.script[min(turn, len(self.script) - 1)]
        answer, is_cut = _split_at_stop(answer, sampling_params.get("stop") or [])
        end = [] if is_cut else [self.tokenizer.eos_token_id]
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), *end]
        most = sampling_params.get("max_tokens") or len(ids)
        reason = "stop" if len(ids) <= most else "length"
        ids = ids[:most]
        ended = reason == "stop" and not is_cut
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        told = ids if self.tells_ids else None
        logprobs = [self.logprob] * len(ids) if self.tells_ids and self.logprob is not None else None
        return text, MetaInfo(output_tokens=told, finish_reason=reason, logprobs=logprobs)


def _split_at_stop(answer: str, stop: str | Sequence[str]) -> tuple[str, bool]:
    """Return the completion through the first stop string, and whether it has one."""
    ends = [answer.find(text) + len(text) for text in ([stop] if isinstance(stop, str) else stop) if text in answer]
    return (answer[: min(ends)], True) if ends else (answer, False)
