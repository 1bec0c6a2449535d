"""Generation for requests of the OpenAI API: complete responses, or streams of chunks.

Knows tokens, sampling keywords and deadlines; nothing of OpenAI, messages or HTTP.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_train.endpoint.errors import ApiError, error_of_engine, timed_out
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
from skyrl_train.utils.async_blocks import gather_or_cancel

GROWTH_SECONDS = 0.05
GROWTH_SECONDS_A_TOKEN = 5e-5
"""Shortest time between two views of an answer that grows, and what each token adds to it: the answer is read anew each
time, and a step of a small model is much cheaper than that."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt and settings of its continuation."""

    ids: list[int]
    params: SamplingKeywords
    """The engines' sampling keywords, `max_tokens` among them and `seed` not."""
    num_choices: int = 1
    seed: int | None = None
    first_index: int = 0
    """Choice i of this prompt draws from (`seed`, `first_index` + i)."""
    session: str | int | None = None
    constraint_param: str | None = None
    """Field of the request that the constraint in `params` is of."""
    waited_seconds: float = 0.0
    """Part of the time of its request that went by before it was admitted."""

    def limited(self, seed: int | None, max_tokens: int | None, waited_seconds: float) -> "Prompt":
        """Return the prompt under the rules of its session.

        Args:
            seed: in place of its own; None: its own.
            max_tokens: the most that an answer may have; None: no further limit.
            waited_seconds: of the time of its request, until the session admitted it.
        """
        params = dict(self.params)
        for name in ("max_tokens", "min_tokens"):
            if max_tokens is not None and params.get(name) is not None:
                params[name] = min(params[name], max_tokens)
        seed = self.seed if seed is None else seed
        return replace(self, params=params, seed=seed, waited_seconds=waited_seconds)

    def request(self, choice: int) -> GenerationRequest:
        """Return the request of a choice."""
        params = self.params
        if self.seed is not None:
            params = params | {"seed": [self.seed, self.first_index + choice]}
        return GenerationRequest(prompt_token_ids=self.ids, sampling_params=params, session_id=self.session)


@dataclass
class GeneratedChoice:
    """Tokens generated for one choice of a request, so far or in the end. The three lists have one entry a token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    stop_reason: str | None = None
    """None: not at its end yet."""
    prompt_log_probs: list[float] | None = None
    top: TopLogProbs | None = None
    """Likeliest tokens in the place of each token, if asked for."""
    prompt_top: TopLogProbs | None = None

    @classmethod
    def of(cls, completion: Completion) -> "GeneratedChoice":
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


class Asker:
    """Client of an engine: a deadline for each request, and its errors as those of the API."""

    def __init__(self, engine: InferenceEngineInterface, timeout_seconds: float):
        self.engine = engine
        self.timeout_seconds = timeout_seconds

    async def whole(self, prompt: Prompt) -> list[GeneratedChoice]:
        """Generate the choices of a prompt. Raises ApiError."""
        return await gather_or_cancel([self._choice(prompt, choice) for choice in range(prompt.num_choices)])

    async def growing(self, prompt: Prompt, choice: int) -> AsyncGenerator[GeneratedChoice]:
        """One choice of a prompt, again and again as it grows; the last has a stop reason, and is that of `whole`.
        Closed, it ends the request. Raises ApiError."""
        answer, has_grown = GeneratedChoice(), asyncio.Event()

        # Called between two steps of this generator, in its loop, so that nothing here needs a lock.
        def on_tokens(delta: TokenDelta) -> None:
            answer.extend(delta)
            has_grown.set()

        asking = asyncio.ensure_future(self._choice(prompt, choice, on_tokens))
        asking.add_done_callback(lambda _: has_grown.set())  # an answer of one token has no growth
        try:
            while True:
                await has_grown.wait()
                has_grown.clear()
                # The whole answer holds all tokens so far, also those that nobody has seen.
                if asking.done():
                    break
                yield answer
                # Tokens that come meanwhile join the answer: a slow reader makes fewer and larger steps.
                pause = GROWTH_SECONDS + GROWTH_SECONDS_A_TOKEN * len(answer.token_ids)
                await asyncio.wait({asking}, timeout=pause)
            yield asking.result()
        finally:
            asking.cancel()

    async def _choice(self, prompt: Prompt, choice: int, on_tokens: OnTokens | None = None) -> GeneratedChoice:
        """Generate a choice. One deadline is for a request and its wait before it was admitted. Raises ApiError."""
        request = prompt.request(choice)
        async with _Deadline(self.timeout_seconds - prompt.waited_seconds):
            try:
                if on_tokens is None:
                    completion = await self.engine.generate(request)
                else:
                    completion = await self.engine.stream(request, on_tokens)
            except Exception as error:  # the far side may be a Ray actor, a server or a library
                refusal = error_of_engine(error)
                if refusal.status == 400 and prompt.constraint_param is not None and _is_about_form(refusal.message):
                    refusal.param = prompt.constraint_param
                raise refusal from error
        if completion.stop_reason == "abort":
            raise ApiError(503, "the request was aborted; send it again", code="aborted")
        return GeneratedChoice.of(completion)


def _is_about_form(message: str) -> bool:
    """Check whether an engine refused a constraint: each library has words of its own."""
    return any(word in message.lower() for word in ("constraint", "schema", "grammar"))


class _Deadline:
    """Deadline whose end is an error of the API."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timeout = asyncio.timeout(max(0.0, seconds))

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            raise timed_out() from None


def end_of_stop(text: str, stop: str, known: int) -> int | None:
    """Return the start of `stop` in `text`, if it ends behind the first `known` characters."""
    place = text.find(stop, max(0, known - len(stop) + 1))
    return place if place >= 0 else None
