"""One trajectory: a model and an environment talk until the environment is satisfied or the length is used up.

Knows no Ray, no batch and no retries. What fails here is raised as `RolloutError`; `skyrl_gym_generator` records it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.errors import RolloutError, WorkerError
from skyrl_train.generators.dialogue import Answer, Dialogue
from skyrl_train.generators.environment import EnvironmentSession
from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineInterface
from skyrl_train.types import ConversationType


@dataclass(frozen=True)
class LengthBudget:
    """How long a trajectory may become.

    Args:
        max_input_length: the most tokens that the model is given to read, in any turn.
        max_tokens: the most it may write in one turn.
        max_context_length: reading and writing together; None if it is not known.
    """

    max_input_length: int
    max_tokens: int
    max_context_length: int | None = None

    def tokens_left(self, num_input_tokens: int) -> int:
        """How many tokens the model may write after reading so many; 0 if none."""
        if num_input_tokens > self.max_input_length:
            return 0
        if self.max_context_length is None:
            return self.max_tokens
        return max(0, min(self.max_tokens, self.max_context_length - num_input_tokens))


@dataclass(frozen=True)
class EngineSession:
    """Requests of one trajectory to an engine.

    Args:
        engine: an engine, or a client over many.
        sampling_params: in the engines' keywords; `max_tokens` and `seed` are set for each turn.
        session_id: same for all turns, so that they may go to one engine.
        seed_of_turn: turn -> seed.
        timeout_seconds: of one answer.
    """

    engine: InferenceEngineInterface
    sampling_params: dict[str, Any]
    session_id: str
    seed_of_turn: Callable[[int], int]
    timeout_seconds: float
    turn_lengths: list[int] = field(default_factory=list)
    """Number of tokens of every answer so far."""

    async def ask(self, input_ids: list[int], turn: int, max_tokens: int) -> Answer:
        """Continue `input_ids` by at most `max_tokens` tokens.

        Raises:
            RolloutError: kind `model` if the engine refuses the request, `infrastructure` if it fails, is aborted, or
                does not answer in time.
            WorkerError: the engine's process died.
        """
        params = self.sampling_params | {"max_tokens": max_tokens, "seed": self.seed_of_turn(turn)}
        request = InferenceEngineInput(
            prompt_token_ids=[input_ids], sampling_params=params, session_ids=[self.session_id]
        )
        try:
            async with asyncio.timeout(self.timeout_seconds) as deadline:
                output = await self.engine.generate(request)
        except (RolloutError, WorkerError):  # a dead engine is no matter of one rollout: it ends the batch
            raise
        except ValueError as error:
            raise RolloutError("model", f"the engine refused the request: {error}") from error
        except Exception as error:  # the far side may be a Ray actor, an HTTP server or a library: any error of theirs
            if isinstance(error, TimeoutError) and deadline.expired():
                what = f"did not answer within generator.request_timeout_seconds={self.timeout_seconds:g}"
            else:
                what = f"raised {type(error).__name__}: {error}"
            raise RolloutError("infrastructure", f"the engine {what}") from error
        if output["stop_reasons"][0] == "abort":
            raise RolloutError("infrastructure", "the engine aborted the request")
        logprobs = output["response_logprobs"]
        if logprobs is None and params.get("logprobs") is not None:
            raise RolloutError(
                "infrastructure", "the engine gave no log-probs though sampling_params.logprobs asks for them"
            )
        self.turn_lengths.append(len(output["response_ids"][0]))
        return Answer(
            text=output["responses"][0],
            token_ids=list(output["response_ids"][0]),
            logprobs=None if logprobs is None else list(logprobs[0]),
            weight_versions=list(output["weight_versions"][0]),
            stop_reason=output["stop_reasons"][0],
        )


async def run_agent_loop(
    env: EnvironmentSession,
    prompt: ConversationType,
    dialogue: Dialogue,
    session: EngineSession,
    budget: LengthBudget,
) -> str:
    """Let the model answer and the environment react, turn by turn; `dialogue` collects the tokens and rewards.

    Returns:
        The stop reason: that of the last answer, or `length` if there was no room for another one.

    Raises:
        RolloutError: the environment, its reward, the model or the engine failed.
    """
    dialogue.open(await env.init(prompt))
    turn, input_ids = 0, dialogue.input_ids()
    while max_tokens := budget.tokens_left(len(input_ids)):
        answer = await session.ask(input_ids, turn, max_tokens)
        dialogue.add_answer(answer)
        step = await env.step(answer.text)
        dialogue.add_step(answer, step)
        if step.done:
            return answer.stop_reason
        previous_input_ids, input_ids = input_ids, dialogue.input_ids()
        if input_ids == previous_input_ids:
            raise RolloutError(
                "environment",
                f"environment {env.env_class!r}: turn {turn} added no token and did not end the episode, "
                "so it would go on for ever",
            )
        turn += 1
    return "length"
