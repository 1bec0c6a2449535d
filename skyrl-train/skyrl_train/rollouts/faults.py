"""Detection of faulty generator output: a trajectory that breaks a rule is recorded as failed, so that it does not
train and the batch continues. Intended for custom generators, graders and remote engines."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loguru import logger

from skyrl_gym.finite_numbers import describe, to_finite
from skyrl_train.errors import FailureKind
from skyrl_train.rollouts.filters import map_samples, map_trajectories, to_failed_sample
from skyrl_train.rollouts.metrics import count_failures
from skyrl_train.rollouts.types import Failure, RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from skyrl_train.config import GeneratorConfig, SamplingParams

TEMPLATE_TOKENS = 16
"""Around an answer, a chat template's header and closing tokens may come on top of the declared limits."""


@dataclass(frozen=True)
class LengthLimits:
    """Maximum token counts of the samples of a batch. A longer sample could exhaust the memory of a whole step.

    Args:
        max_input_length: maximum tokens of a prompt.
        max_generate_length: maximum tokens of one completion.
        one_answer_a_sample: every response is one completion. Otherwise a response is a conversation, which may be as
            long as the input of the last turn plus its completion.
    """

    max_input_length: int
    max_generate_length: int
    one_answer_a_sample: bool

    @classmethod
    def of(cls, generator: "GeneratorConfig", sampling: "SamplingParams") -> "LengthLimits | None":
        """Return the limits from the settings of `generator`; None for agents (a task file, a harness), which have
        separate limits.

        Args:
            sampling: `generator.sampling_params` or `generator.eval_sampling_params`.
        """
        if not generator.uses_environments:
            return None
        turns_are_samples = generator.step_wise_trajectories and not generator.merge_stepwise_output
        return cls(
            max_input_length=generator.max_input_length,
            max_generate_length=sampling.max_generate_length,
            one_answer_a_sample=generator.max_turns == 1 or turns_are_samples,
        )

    def max_response_length(self, num_prompt_tokens: int) -> int:
        """Return the maximum number of response tokens for a prompt of this length."""
        longest_answer = self.max_generate_length + TEMPLATE_TOKENS
        if self.one_answer_a_sample:
            return longest_answer
        return max(0, self.max_input_length - num_prompt_tokens) + longest_answer

    def describe_violation(self, num_prompt_tokens: int, num_response_tokens: int) -> str | None:
        """Describe the limit that a sample of these lengths exceeds."""
        if num_prompt_tokens > self.max_input_length:
            return f"has a prompt of {num_prompt_tokens} tokens; generator.max_input_length is {self.max_input_length}"
        if num_response_tokens <= self.max_response_length(num_prompt_tokens):
            return None
        rule = f"has a response of {num_response_tokens} tokens; max_generate_length is {self.max_generate_length}"
        if self.one_answer_a_sample:
            return f"{rule}, and generator.max_turns or step_wise_trajectories make a response one completion"
        return f"{rule}, generator.max_input_length {self.max_input_length}, its prompt has {num_prompt_tokens}"


def record_faults(batch: RolloutBatch, limits: LengthLimits | None = None) -> RolloutBatch:
    """Mark trajectories that break a rule as failed, truncated to the limits. Rules: prompt and response are not empty,
    rewards and log-probs are finite, and the limits hold. Trajectories that already failed keep their failure."""
    checked = map_trajectories(batch, lambda trajectory: _check_trajectory(trajectory, limits))
    before, after = batch.trajectories, checked.trajectories
    broken = [new for old, new in zip(before, after, strict=True) if new is not old]
    if broken:
        first = broken[0].failure
        assert first is not None
        logger.warning("{} trajectories are invalid and not trained; the first: {}", len(broken), first.message)
        checked = replace(checked, metrics=checked.metrics | count_failures(after))
    if not any(any(sample.loss_mask) for _, _, sample in checked.rows()):
        logger.warning("the loss mask of every trajectory of this batch is zero: it has no effect on training")
    return checked


def is_sound(group: TrajectoryGroup, limits: LengthLimits | None) -> bool:
    """Check that no trajectory of a group has failed or breaks a rule."""
    return all(each.failure is None and _check_trajectory(each, limits) is each for each in group.trajectories)


def _check_trajectory(trajectory: Trajectory, limits: LengthLimits | None) -> Trajectory:
    """Return the same trajectory object, or a failed trajectory if one of its samples breaks a rule."""
    faults = (_find_fault(sample, limits) for sample in trajectory.samples)
    fault = next((fault for fault in faults if fault is not None), None)
    if fault is None:
        return trajectory
    kind, rule = fault
    failure = trajectory.failure or Failure(kind, f"trajectory {trajectory.id.to_string()} {rule}")
    failed = map_samples(trajectory, lambda sample: to_failed_sample(_truncate(sample, limits)))
    return replace(failed, failure=failure, stop_reason="error")


def _find_fault(sample: TrainingSample, limits: LengthLimits | None) -> tuple[FailureKind, str] | None:
    """Return kind and message of the first rule that a sample breaks."""
    num_prompt, num_response = len(sample.prompt_ids), len(sample.response_ids)
    if not num_prompt or not num_response:
        rule = f"must have a prompt and a response; they have {num_prompt} and {num_response} tokens"
    elif (odd := _find_non_finite(sample.rewards)) is not None:
        return "reward", f"must have finite numbers as rewards; got {odd}"
    elif sample.log_probs is not None and (odd := _find_non_finite(sample.log_probs, sample.loss_mask)) is not None:
        rule = f"must have finite numbers as log-probs; got {odd}"
    elif limits is None or (rule := limits.describe_violation(num_prompt, num_response)) is None:
        return None
    return "infrastructure", rule


def _find_non_finite(values: Sequence[float], mask: Sequence[int] | None = None) -> str | None:
    """Return the first non-finite value where the mask is not 0."""
    with contextlib.suppress(TypeError, OverflowError):  # not convertible to float: found below
        if math.isfinite(sum(values)):
            return None
    for value, counts in zip(values, mask or [1] * len(values), strict=True):
        if counts and not isinstance(value, bool) and to_finite(value) is None:
            return describe(value)
    return None


def _truncate(sample: TrainingSample, limits: LengthLimits | None) -> TrainingSample:
    """Truncate the tokens of a faulty sample to the limits; an empty prompt or response becomes one token (id 0)."""
    prompt, response = sample.prompt_ids or [0], sample.response_ids or [0]
    if limits is not None:
        prompt = prompt[: limits.max_input_length]
        response = response[: limits.max_response_length(len(prompt))]
    return replace(sample, prompt_ids=prompt, response_ids=response)
