"""Generation for requests of the OpenAI API: complete responses, or streams of chunks.

Handles tokens, sampling keywords and deadlines; independent of OpenAI's API, messages and HTTP.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.endpoint.errors import ApiError, build_timeout_error, convert_engine_error
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.request import (
    Completion,
    GenerationRequest,
    OnTokens,
    SamplingKeywords,
    TokenDelta,
    TopLogProbs,
    join_top_log_probs,
)

GROWTH_SECONDS = 0.05
GROWTH_SECONDS_A_TOKEN = 5e-5
"""Minimum interval between two states of a streamed choice, and its growth per token. Each state decodes the whole
text, which costs far more than a step of a small model.
"""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt and settings of its continuation."""

    ids: list[int]
    params: SamplingKeywords
    """Engine sampling keywords, with `max_tokens` and without `seed`."""
    num_choices: int = 1
    seed: int | None = None
    first_index: int = 0
    """Choice i of this prompt samples from (`seed`, `first_index` + i)."""
    session: str | int | None = None
    constraint_param: str | None = None
    """Request field that the constraint in `params` comes from."""
    waited_seconds: float = 0.0
    """Seconds of the request's deadline spent before admission."""

    def apply_rules(self, seed: int | None, max_tokens: int | None, waited_seconds: float) -> "Prompt":
        """Return the prompt with the rules of its session applied.

        Args:
            seed: replaces the prompt's; None: unchanged.
            max_tokens: additional limit of a completion; None: no limit.
            waited_seconds: seconds spent until the session admitted the request.
        """
        params = dict(self.params)
        for name in ("max_tokens", "min_tokens"):
            if max_tokens is not None and params.get(name) is not None:
                params[name] = min(params[name], max_tokens)
        seed = self.seed if seed is None else seed
        return replace(self, params=params, seed=seed, waited_seconds=waited_seconds)

    def build_request(self, choice: int) -> GenerationRequest:
        """Build the engine request of a choice."""
        params = self.params
        if self.seed is not None:
            params = params | {"seed": [self.seed, self.first_index + choice]}
        return GenerationRequest(prompt_token_ids=self.ids, sampling_params=params, session_id=self.session)


@dataclass
class GeneratedChoice:
    """Tokens generated for one choice of a request, partial or complete. The three lists have one entry per token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    stop_reason: str | None = None
    """None: not complete."""
    prompt_log_probs: list[float] | None = None
    top: TopLogProbs | None = None
    """Most likely tokens at each position, if requested."""
    prompt_top: TopLogProbs | None = None

    @classmethod
    def from_completion(cls, completion: Completion) -> "GeneratedChoice":
        """Return a complete choice."""
        return cls(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            weight_versions=completion.weight_versions,
            stop_reason=completion.stop_reason,
            prompt_log_probs=completion.prompt_log_probs,
            top=completion.top,
            prompt_top=completion.prompt_top,
        )

    def extend(self, delta: TokenDelta) -> None:
        """Append tokens of a stream."""
        self.token_ids += delta.token_ids
        self.weight_versions += delta.weight_versions
        if delta.log_probs is None:
            self.log_probs = None
        elif self.log_probs is not None:
            self.log_probs += delta.log_probs
        if delta.top is not None:
            self.top = delta.top if self.top is None else join_top_log_probs([self.top, delta.top])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.token_ids[length:], self.weight_versions[length:]
        if self.log_probs is not None:
            del self.log_probs[length:]
        if self.top is not None:
            self.top = TopLogProbs(self.top.ids[:length], self.top.log_probs[:length])


class EngineRequester:
    """Client of an engine that applies a deadline to each request and converts engine errors to ApiError."""

    def __init__(self, engine: InferenceEngineInterface, timeout_seconds: float):
        self.engine = engine
        self.timeout_seconds = timeout_seconds

    async def generate_choices(self, prompt: Prompt) -> list[GeneratedChoice]:
        """Generate the choices of a prompt. Raises ApiError."""
        return await gather_or_cancel([self._generate_choice(prompt, choice) for choice in range(prompt.num_choices)])

    async def generate_growing(self, prompt: Prompt, choice: int) -> AsyncGenerator[GeneratedChoice]:
        """Yield successive states of one choice; the last has a stop reason and equals the result of
        `generate_choices`. Closing the generator cancels the request. Raises ApiError.
        """
        answer, has_grown = GeneratedChoice(), asyncio.Event()

        # Called between two steps of this generator, in its loop, so that nothing here needs a lock.
        def on_tokens(delta: TokenDelta) -> None:
            answer.extend(delta)
            has_grown.set()

        asking = asyncio.ensure_future(self._generate_choice(prompt, choice, on_tokens))
        asking.add_done_callback(lambda _: has_grown.set())  # a completion of one token has no partial state
        try:
            while True:
                await has_grown.wait()
                has_grown.clear()
                # The completion has all tokens, including unseen ones.
                if asking.done():
                    break
                yield answer
                # Tokens received meanwhile are included: a slow reader gets fewer and larger steps.
                pause = GROWTH_SECONDS + GROWTH_SECONDS_A_TOKEN * len(answer.token_ids)
                await asyncio.wait({asking}, timeout=pause)
            yield asking.result()
        finally:
            asking.cancel()

    async def _generate_choice(self, prompt: Prompt, choice: int, on_tokens: OnTokens | None = None) -> GeneratedChoice:
        """Generate a choice. The deadline includes the wait for admission. Raises ApiError."""
        request = prompt.build_request(choice)
        async with _Deadline(self.timeout_seconds - prompt.waited_seconds):
            try:
                if on_tokens is None:
                    completion = await self.engine.generate(request)
                else:
                    completion = await self.engine.stream(request, on_tokens)
            except Exception as error:  # the engine may be a Ray actor, a server or a library
                refusal = convert_engine_error(error)
                if refusal.status == 400 and prompt.constraint_param is not None and _is_about_form(refusal.message):
                    refusal.param = prompt.constraint_param
                raise refusal from error
        if completion.stop_reason == "abort":
            raise ApiError(503, "the request was aborted; retry", code="aborted")
        return GeneratedChoice.from_completion(completion)


def _is_about_form(message: str) -> bool:
    """Return whether an engine rejected a constraint. Each library words this differently."""
    return any(word in message.lower() for word in ("constraint", "schema", "grammar"))


class _Deadline:
    """Deadline that raises ApiError on expiry."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timeout = asyncio.timeout(max(0.0, seconds))

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            raise build_timeout_error() from None


def find_stop(text: str, stop: str, known: int) -> int | None:
    """Return the start of `stop` in `text`, if it ends after the first `known` characters."""
    place = text.find(stop, max(0, known - len(stop) + 1))
    return place if place >= 0 else None
