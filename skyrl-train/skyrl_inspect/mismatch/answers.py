"""Requests to an engine: answers under several sampling settings, and the log-probs of fixed tokens.

Knows engines by their interface only. Results are plain lists, so that they can be sent by another process.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.errors import SkyRLError
from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInterface,
    SamplingKeywords,
)
from skyrl_train.weight_sync.canary import canary_prompts


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of answers."""

    name: str
    params: dict[str, Any]
    """Keywords of `GenerationRequest.sampling_params`, without lengths and seed."""

    @property
    def temperature(self) -> float:
        """Divisor of the logits for log-probs: 1 where sampling is greedy."""
        return self.params.get("temperature", 1.0) or 1.0


SAMPLINGS = {
    sampling.name: sampling
    for sampling in (
        Sampling("temperature 1", {"temperature": 1.0}),
        Sampling("temperature 0.7", {"temperature": 0.7}),
        Sampling("top_p 0.9", {"temperature": 1.0, "top_p": 0.9}),
        Sampling("top_k 20", {"temperature": 1.0, "top_k": 20}),
        Sampling("min_p 0.1", {"temperature": 1.0, "min_p": 0.1}),
        Sampling("repetition_penalty 1.2", {"temperature": 1.0, "repetition_penalty": 1.2}),
        Sampling("greedy", {"temperature": 0.0}),
    )
}
"""Each changes one thing, so that what an engine does to its log-probs shows where it does it."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Requests to every engine."""

    prompts: list[list[int]]
    samplings: list[Sampling]
    max_tokens: int
    """Maximum number of tokens of a response."""

    seed: int = 0
    timeout_seconds: float = 3600.0
    """The longest that one sampling setting may take."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to all prompts under one sampling setting; empty answers are left out."""

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[list[float]]
    """Log-prob of each token of each response, as reported by the engine."""
    routes: list[ExpertRoutes | None] | None = None
    """Experts that the engine sent the tokens of each row to; None if it returns none."""


@dataclass(frozen=True, kw_only=True)
class EngineAnswers:
    """Answers of one engine to all requests."""

    info: EngineInfo
    answers: dict[str, Answers]
    """Responses by the name of the sampling setting."""

    canary: Answers | None
    """The engine's log-probs of fixed tokens at temperature 1 (each row's first token is its `prompt`); None if it
    gives none of prompts."""

    refused: dict[str, str] = field(default_factory=dict)
    """A sampling setting, or `canary` -> reason of a missing completion."""


async def send_questions(engine: InferenceEngineInterface, questions: Questions) -> EngineAnswers:
    """Send all requests. A refusal of the engine is recorded, and the next request sent.

    Raises:
        WorkerError: the engine died.
    """
    info = await engine.describe()
    answers: dict[str, Answers] = {}
    canary, refused = None, {}
    try:
        canary = await _score_canary(engine, info, questions)
    except _REFUSALS as error:
        refused["canary"] = _describe_refusal(error)
    for sampling in questions.samplings:
        try:
            answers[sampling.name] = await _collect_answers(engine, sampling, questions)
        except _REFUSALS as error:
            refused[sampling.name] = _describe_refusal(error)
    return EngineAnswers(info=info, answers=answers, canary=canary, refused=refused)


_REFUSALS = (SkyRLError, ValueError, TimeoutError)


def _describe_refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else "no completion before the deadline"


async def _collect_answers(engine: InferenceEngineInterface, sampling: Sampling, questions: Questions) -> Answers:
    params = {"logprobs": 0, "max_tokens": questions.max_tokens, "seed": questions.seed, **sampling.params}
    completions = await _generate_all(engine, questions.prompts, params, questions)
    log_probs = [completion.log_probs for completion in completions if completion.log_probs is not None]
    if len(log_probs) < len(completions):
        raise ValueError("the engine returned no log-probs of its completions")
    routes = [completion.routes for completion in completions]
    responses = [completion.token_ids for completion in completions]
    return _filter_answered(questions.prompts, responses, log_probs, routes if any(routes) else None)


async def _generate_all(
    engine: InferenceEngineInterface, prompts: Sequence[list[int]], params: SamplingKeywords, questions: Questions
) -> list[Completion]:
    """Complete all prompts within the deadline; prompt i draws from the seed pair (seed, i)."""
    requests = [
        GenerationRequest(prompt_token_ids=prompt, sampling_params=params | {"seed": [params["seed"], index]})
        for index, prompt in enumerate(prompts)
    ]
    calls = gather_or_cancel([engine.generate(request) for request in requests])
    return await asyncio.wait_for(calls, questions.timeout_seconds)


async def _score_canary(engine: InferenceEngineInterface, info: EngineInfo, questions: Questions) -> Answers:
    if "prompt_log_probs" in info.unsupported:
        raise ValueError(info.unsupported["prompt_log_probs"])
    rows = canary_prompts(info.vocab_size, info.max_model_len)
    params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "prompt_logprobs": 0, "seed": questions.seed}
    completions = await _generate_all(engine, rows, params, questions)
    log_probs = [each.prompt_log_probs for each in completions if each.prompt_log_probs is not None]
    if len(log_probs) < len(completions):
        raise ValueError("the engine returned no log-probs of its prompts")
    return _filter_answered([row[:1] for row in rows], [row[1:] for row in rows], log_probs)


def _filter_answered(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    routes: Sequence[ExpertRoutes | None] | None = None,
) -> Answers:
    """The rows that have tokens.

    Raises:
        ValueError: the engine gave more or fewer log-probs than tokens.
    """
    lengths = [len(row) for row in responses], [len(row) for row in log_probs]
    if lengths[0] != lengths[1]:
        raise ValueError(f"the engine returned {lengths[1]} log-probs for {lengths[0]} tokens")
    own_routes = [None] * len(prompts) if routes is None else routes
    rows = [row for row in zip(prompts, responses, log_probs, own_routes, strict=True) if row[1]]
    if not rows:
        raise ValueError("every completion of the engine was empty")
    return Answers(
        prompts=[list(prompt) for prompt, *_ in rows],
        responses=[list(response) for _, response, *_ in rows],
        log_probs=[list(values) for _, _, values, _ in rows],
        routes=None if routes is None else [own for *_, own in rows],
    )
