"""Agent loop of one trajectory: turns of model and environment until the episode is done or the length budget is used
up.

Independent of Ray, batches and retries. Failures are raised as `RolloutError`; `skyrl_gym_generator` records them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from skyrl_train.errors import RolloutError, WorkerError
from skyrl_train.generators.dialogue import Dialogue
from skyrl_train.generators.environment import EnvironmentSession
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.request import Completion, GenerationRequest, SamplingKeywords
from skyrl_train.types import ConversationType
from skyrl_train.utils.explanations import write_explanation


@dataclass(frozen=True)
class LengthBudget:
    """Length limits of a trajectory.

    Args:
        max_input_length: maximum number of input tokens of any turn.
        max_tokens: maximum number of generated tokens of one turn.
        max_context_length: maximum sum of both; None if unknown.
    """

    max_input_length: int
    max_tokens: int
    max_context_length: int | None = None

    def get_tokens_left(self, num_input_tokens: int) -> int:
        """Return the number of tokens that the model may generate after this many input tokens."""
        if num_input_tokens > self.max_input_length:
            return 0
        if self.max_context_length is None:
            return self.max_tokens
        return max(0, min(self.max_tokens, self.max_context_length - num_input_tokens))


@dataclass(frozen=True)
class EngineSession:
    """Requests of one trajectory to an engine, including error handling.

    Args:
        engine: an engine, or a client over several.
        sampling_params: without `max_tokens` and `seed`, which are set for each turn.
        session_id: equal for all turns, so that they may be routed to the same engine.
        seed_of_turn: function from turn to seed.
        timeout_seconds: deadline of one request.
    """

    engine: InferenceEngineInterface
    sampling_params: SamplingKeywords
    session_id: str
    seed_of_turn: Callable[[int], int]
    timeout_seconds: float
    turn_lengths: list[int] = field(default_factory=list)
    """Number of tokens of every completion so far."""

    def build_request(self, input_ids: list[int], turn: int, max_tokens: int) -> GenerationRequest:
        """Build the request of a turn: continue `input_ids` by at most `max_tokens` tokens."""
        params = self.sampling_params | {"max_tokens": max_tokens, "seed": self.seed_of_turn(turn)}
        return GenerationRequest(prompt_token_ids=input_ids, sampling_params=params, session_id=self.session_id)

    @contextlib.asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Limit the duration of a request and convert its errors to RolloutError: kind `model` if the engine refuses
        the request, `infrastructure` if it fails or times out. WorkerError is passed through: a crashed engine ends the
        batch, not one trajectory."""
        timeout = asyncio.timeout(self.timeout_seconds)
        try:
            async with timeout:
                yield
        except (RolloutError, WorkerError):
            raise
        except ValueError as error:
            raise RolloutError("model", f"the engine refused the request: {error}") from error
        except Exception as error:  # any error of a Ray actor, HTTP server or library
            if isinstance(error, TimeoutError) and timeout.expired():
                what = f"did not respond within generator.request_timeout_seconds={self.timeout_seconds:g}"
                what += await asyncio.to_thread(write_explanation, f"an engine {what}")
            else:
                what = f"raised {type(error).__name__}: {error}"
            raise RolloutError("infrastructure", f"the engine {what}") from error

    def check(self, completion: Completion) -> None:
        """Count the tokens of a completion. Raise RolloutError if it was aborted or has no log-probs."""
        if completion.stop_reason == "abort":
            raise RolloutError("infrastructure", "the engine aborted the request")
        if completion.log_probs is None and self.sampling_params.get("logprobs") is not None:
            raise RolloutError(
                "infrastructure", "the engine returned no log-probs though sampling_params.logprobs requests them"
            )
        self.turn_lengths.append(len(completion.token_ids))


async def run_agent_loop(
    env: EnvironmentSession,
    prompt: ConversationType,
    dialogue: Dialogue,
    session: EngineSession,
    budget: LengthBudget,
) -> str:
    """Generate a completion and step the environment, turn by turn; `dialogue` collects tokens and rewards.

    Returns:
        The stop reason of the last completion, or `length` if the budget was used up.

    Raises:
        RolloutError: the environment, its reward, the model or the engine failed.
    """
    dialogue.open(await env.init(prompt))
    turn, input_ids = 0, dialogue.get_input_ids()
    while max_tokens := budget.get_tokens_left(len(input_ids)):
        async with session.deadline():
            completion = await session.engine.generate(session.build_request(input_ids, turn, max_tokens))
        session.check(completion)
        dialogue.add_completion(completion)
        step = await env.step(completion.text)
        dialogue.add_step(completion, step)
        if step.done:
            return completion.stop_reason
        previous_input_ids, input_ids = input_ids, dialogue.get_input_ids()
        if input_ids == previous_input_ids:
            raise RolloutError(
                "environment",
                f"environment {env.env_class!r}: turn {turn} added no token and did not end the episode, "
                "so it would never end",
            )
        turn += 1
    return "length"
