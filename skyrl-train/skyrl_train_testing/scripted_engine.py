"""Rollout engine that writes what a script says, for tests and benchmarks of what stands between engines and agents."""

import asyncio
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInterface,
    OnTokens,
    TokenDelta,
)

_STEP, _STEP_SECONDS = 16, 0.002
"""Tokens of a streamed answer that come together, and the time until the next ones."""


class PromptScriptEngine(InferenceEngineInterface):
    """Engine that responds to each prompt with the text of `script` and an end-of-sequence token.

    A request that continues a truncated response gets the rest of it. Stop strings end a response. Token j of a
    response has log-prob -(j + 1) / 1000.

    Args:
        script: text of a prompt, special tokens included -> text of the answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, script: Callable[[str], str], max_model_len: int = 4096
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.max_model_len = max_model_len
        self.prompts: list[list[int]] = []
        """Prompts of the requests, those that go on from an answer left out."""
        self._rests: dict[tuple[int, ...], list[int]] = {}

    async def describe(self) -> EngineInfo:
        return EngineInfo(
            backend="scripted",
            release="0",
            model="scripted",
            vocab_size=len(self.tokenizer),
            max_model_len=self.max_model_len,
            dtype=None,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        ids, reason = self._answer(request.prompt_token_ids, request.sampling_params)
        asked = request.sampling_params.get("logprobs") is not None
        log_probs = [-(j + 1) / 1000 for j in range(len(ids))] if asked else None
        return Completion(ids, reason, [0] * len(ids), log_probs, self._text(ids))

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        completion = await self.generate(request)
        ids, log_probs = completion.token_ids, completion.log_probs
        for start in range(0, len(ids) - _STEP, _STEP):
            end = start + _STEP
            own = None if log_probs is None else log_probs[start:end]
            on_tokens(TokenDelta(ids[start:end], own, [0] * _STEP))
            await asyncio.sleep(_STEP_SECONDS)
        return completion

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def _answer(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], str]:
        ids = self._rests.pop(tuple(prompt), None)
        if ids is None:
            self.prompts.append(prompt)
            encoded: Any = self.tokenizer(self.script(self._text(prompt)), add_special_tokens=False)
            ids = [*encoded["input_ids"], self.tokenizer.eos_token_id]
        end = self._find_stop_end(ids, params.get("stop") or [])
        limit = params["max_tokens"]
        if min(end, len(ids)) <= limit:
            return ids[:end], "stop"
        self._rests[(*prompt, *ids[:limit])] = ids[limit:]
        return ids[:limit], "length"

    def _find_stop_end(self, ids: list[int], stop: list[str]) -> int:
        """Return the number of tokens up to the end of the first stop string; all tokens without one."""
        if not any(text in self._text(ids) for text in stop):
            return len(ids)
        ends = (n for n in range(1, len(ids)) if any(text in self._text(ids[:n]) for text in stop))
        return next(ends, len(ids))

    async def weight_version(self) -> int:
        return 0

    async def _nothing(self, *_: Any, **__: Any) -> Any: ...

    pause_generation = resume_generation = abort_generation = sleep = wake_up = reset_prefix_cache = teardown = _nothing
    init_weight_update_communicator = update_named_weights = finish_weight_update = load_lora = unload_lora = _nothing
    check_health = _nothing
