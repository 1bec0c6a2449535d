"""Generation for requests of the OpenAI API: complete responses, or streams of chunks.

Knows tokens, sampling keywords and deadlines; nothing of OpenAI, messages or HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from skyrl_train.inference_engines.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    SamplingKeywords,
    TopLogProbs,
    join_top_log_probs,
    raise_failures,
)
from skyrl_train.inference_engines.continuation import depends_on_answer
from skyrl_train.inference_engines.openai_api.errors import ApiError, error_of_engine, timed_out

Decode = Callable[[list[int]], str]

FIRST_PIECE = 16
LARGEST_PIECE = 256
"""Tokens of the pieces of a streamed answer: each twice as long as the one before, up to the largest. Each is a request
of its own behind prompt and pieces so far, which engines have in their prefix cache."""


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
    stop: list[str] = field(default_factory=list)
    constraint_param: str | None = None
    """Field of the request that the constraint in `params` is of."""
    waited_seconds: float = 0.0
    """Part of the time of its request that went by before it was admitted."""
    in_pieces: bool = True
    """Whether a stream may ask for the answer in pieces: not where a piece depends on the tokens before it and the
    engine cannot be told which of the prompt's are the answer's."""

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

    def seeds(self) -> list[list[int]] | None:
        """One pair for each choice."""
        if self.seed is None:
            return None
        return [[self.seed, self.first_index + choice] for choice in range(self.num_choices)]


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

    def add(self, output: InferenceEngineOutput, row: int) -> None:
        """Append the tokens that an engine generated behind the prompt and this choice."""
        log_probs = output["response_logprobs"]
        self.token_ids += output["response_ids"][row]
        self.weight_versions += output["weight_versions"][row]
        self.log_probs = None if log_probs is None or self.log_probs is None else self.log_probs + list(log_probs[row])
        if (top := output.get("response_top_logprobs")) is not None:
            self.top = top[row] if self.top is None else join_top_log_probs([self.top, top[row]])
        if self.prompt_top is None and (prompt_top := output.get("prompt_top_logprobs")) is not None:
            self.prompt_top = prompt_top[row]
        of_prompt = output.get("prompt_logprobs")
        if self.prompt_log_probs is None and of_prompt is not None:
            self.prompt_log_probs = of_prompt[row]

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
        async with _Deadline(self._seconds_left(prompt)):
            output = await self._ask(prompt, prompt.ids, prompt.params, prompt.num_choices, prompt.seeds())
        answers = []
        for row in range(prompt.num_choices):
            answer = GeneratedChoice(stop_reason=output["stop_reasons"][row])
            answer.add(output, row)
            answers.append(answer)
        return answers

    async def pieces(self, prompt: Prompt, choice: int, decode: Decode) -> AsyncIterator[GeneratedChoice]:
        """One choice of a prompt, again and again as it grows; the last has a stop reason. Raises ApiError.

        With a seed, the tokens are those of `whole` in engines whose random numbers belong to places in the text
        (native); others draw anew for each piece, from the same distribution.
        """
        # One session, so that each piece goes where the one before it is cached.
        prompt = replace(prompt, session=f"stream {uuid4()}" if prompt.session is None else prompt.session)
        answer, seeds = GeneratedChoice(), prompt.seeds()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._seconds_left(prompt)
        most, fewest = prompt.params["max_tokens"], prompt.params.get("min_tokens") or 0
        size = FIRST_PIECE if prompt.in_pieces else most
        depends = depends_on_answer(prompt.params)
        while answer.stop_reason is None:
            done = len(answer.token_ids)
            size = min(size, most - done)
            params = prompt.params | {"max_tokens": size, "min_tokens": min(size, max(0, fewest - done))}
            if depends and done:
                params["num_answer_tokens"] = done
            async with _Deadline(ends_at - loop.time()):
                pair = None if seeds is None else [seeds[choice]]
                output = await self._ask(prompt, prompt.ids + answer.token_ids, params, 1, pair)
            answer.add(output, 0)
            written = len(answer.token_ids)
            stopped = output["stop_reasons"][0]
            if (length := _length_at_stop(answer.token_ids, prompt.stop, max(done, fewest), decode)) is not None:
                answer.truncate(length)
                answer.stop_reason = "stop"
            elif stopped != "length" or written >= most or written < done + size:  # less: the context is full
                answer.stop_reason = stopped
            size = min(2 * size, LARGEST_PIECE)
            yield answer

    def _seconds_left(self, prompt: Prompt) -> float:
        """Return the time that a request has for its answers: one deadline is for these and its wait before them."""
        return self.timeout_seconds - prompt.waited_seconds

    async def _ask(
        self, prompt: Prompt, ids: list[int], params: SamplingKeywords, num: int, seeds: list[list[int]] | None
    ) -> InferenceEngineOutput:
        request = InferenceEngineInput(
            prompt_token_ids=[ids] * num,
            sampling_params=params if seeds is None else params | {"seed": seeds},
            session_ids=None if prompt.session is None else [prompt.session] * num,
        )
        try:
            output = await self.engine.generate(request)
            raise_failures(output)  # a choice that failed is no answer to its request
        except Exception as error:  # the far side may be a Ray actor, a server or a library
            refusal = error_of_engine(error)
            if refusal.status == 400 and prompt.constraint_param is not None and _is_about_form(refusal.message):
                refusal.param = prompt.constraint_param
            raise refusal from error
        if "abort" in output["stop_reasons"]:
            raise ApiError(503, "the request was aborted; send it again", code="aborted")
        return output


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


def _length_at_stop(ids: list[int], stop: list[str], start: int, decode: Decode) -> int | None:
    """Return the number of tokens up to the end of the first stop text, searched from token `start` on; None: no match.

    An engine that continues an answer does not see a stop text that began before it.
    """
    if not stop or not any(text in decode(ids) for text in stop):
        return None
    for length in range(start + 1, len(ids) + 1):
        known, text = decode(ids[: length - 1]), decode(ids[:length])
        if any(end_of_stop(text, word, len(known)) is not None for word in stop):
            return length
    return None


def end_of_stop(text: str, stop: str, known: int) -> int | None:
    """Return the start of `stop` in `text`, if it ends behind the first `known` characters."""
    place = text.find(stop, max(0, known - len(stop) + 1))
    return place if place >= 0 else None
