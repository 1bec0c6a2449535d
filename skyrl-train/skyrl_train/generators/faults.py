"""What a generator got wrong in single trajectories: named, and recorded on them as failures, so that they train
nothing and the batch goes on. Meant for users' own generators, judges and remote engines."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from loguru import logger

from skyrl_train.errors import FailureKind
from skyrl_train.generators.base import Failure, GeneratorOutput
from skyrl_train.generators.dialogue import NOT_WRITTEN
from skyrl_train.generators.metrics import failure_counts
from skyrl_train.generators.step_wise import rows_of_trajectories

if TYPE_CHECKING:
    from skyrl_train.config import GeneratorConfig, SamplingParams

TEMPLATE_TOKENS = 16
"""Around an answer, a chat template's header and closing tokens may come on top of the declared limits."""


@dataclass(frozen=True)
class LengthLimits:
    """How long the rows of a batch may be, in tokens: a longer one could cost the whole step its memory.

    Args:
        max_input_length: of a prompt.
        max_generate_length: of one answer.
        one_answer_a_row: every response is one answer. Otherwise a response is a conversation, which may be as long as
            the last turn's input and its answer.
    """

    max_input_length: int
    max_generate_length: int
    one_answer_a_row: bool

    @classmethod
    def of(cls, generator: "GeneratorConfig", sampling: "SamplingParams") -> "LengthLimits | None":
        """Those that `generator` declares; None with a task file, which has limits of its own. `sampling`: its
        `sampling_params` or its `eval_sampling_params`."""
        if generator.task is not None:
            return None
        turns_are_rows = generator.step_wise_trajectories and not generator.merge_stepwise_output
        return cls(
            max_input_length=generator.max_input_length,
            max_generate_length=sampling.max_generate_length,
            one_answer_a_row=generator.max_turns == 1 or turns_are_rows,
        )

    def max_response_length(self, num_prompt_tokens: int) -> int:
        """The most tokens of a response to a prompt of so many."""
        longest_answer = self.max_generate_length + TEMPLATE_TOKENS
        if self.one_answer_a_row:
            return longest_answer
        return max(0, self.max_input_length - num_prompt_tokens) + longest_answer

    def broken_rule(self, num_prompt_tokens: int, num_response_tokens: int) -> str | None:
        """What a row of so many tokens is over, in words."""
        if num_prompt_tokens > self.max_input_length:
            return f"has a prompt of {num_prompt_tokens} tokens; generator.max_input_length is {self.max_input_length}"
        if num_response_tokens <= self.max_response_length(num_prompt_tokens):
            return None
        rule = f"has a response of {num_response_tokens} tokens; max_generate_length is {self.max_generate_length}"
        if self.one_answer_a_row:
            return f"{rule}, and generator.max_turns or step_wise_trajectories say that a response is one answer"
        return f"{rule}, generator.max_input_length {self.max_input_length}, its prompt has {num_prompt_tokens}"


def record_faults(output: GeneratorOutput, limits: LengthLimits | None = None) -> None:
    """Makes failures of the trajectories that break a rule, in place: all their rows get loss mask 0, reward 0 and the
    stop reason `error`, and are cut to the limits. The rules: a prompt and a response have tokens, rewards and
    log-probs are finite numbers, and the limits hold. Trajectories that have failed already keep their failure.
    """
    failures = list(output.get("failures") or [None] * len(output["response_ids"]))
    num_recorded, first = 0, None
    for rows in rows_of_trajectories(output):
        found = next((failure for row in rows if (failure := _fault(output, row, limits)) is not None), None)
        if found is None:
            continue
        for row in rows:
            failures[row] = failures[row] or found
            _disarm(output, row, limits)
        num_recorded += 1
        first = first or found.message
    if not num_recorded:
        return
    logger.warning("{} trajectories broke a rule and train nothing; the first: {}", num_recorded, first)
    output["failures"] = failures
    of_trajectories = [failures[rows.start] for rows in rows_of_trajectories(output)]
    output["rollout_metrics"] = (output["rollout_metrics"] or {}) | failure_counts(of_trajectories)


def _fault(output: GeneratorOutput, row: int, limits: LengthLimits | None) -> Failure | None:
    """The first rule that a row breaks."""
    prompt, response = output["prompt_token_ids"][row], output["response_ids"][row]
    reward, log_probs = output["rewards"][row], output["rollout_logprobs"]
    kind: FailureKind = "infrastructure"
    if not prompt or not response:
        rule = f"must have a prompt and a response; they are of {len(prompt)} and {len(response)} tokens"
    elif (odd := _first_odd(reward if isinstance(reward, list) else [reward])) is not None:
        kind, rule = "reward", f"must have finite numbers as rewards; got {odd}"
    elif log_probs is not None and (odd := _first_odd(log_probs[row], output["loss_masks"][row])) is not None:
        rule = f"must have finite numbers as log-probs; got {odd}"
    elif limits is None or (rule := limits.broken_rule(len(prompt), len(response))) is None:
        return None
    ids = output.get("trajectory_ids")
    name = f"trajectory {row}" if ids is None else f"trajectory {ids[row].to_string()}"
    return Failure(kind, f"{name} {rule}")


def _first_odd(values: Sequence[float], mask: Sequence[int] | None = None) -> str | None:
    """The first value (where the mask is not 0) that is no finite number."""
    with contextlib.suppress(TypeError):  # a value that is no number at all: it is found below
        if math.isfinite(sum(values)):
            return None
    for value, counts in zip(values, mask or [1] * len(values), strict=True):
        if counts and not (isinstance(value, Real) and math.isfinite(value)):
            return repr(value)
    return None


def _disarm(output: GeneratorOutput, row: int, limits: LengthLimits | None) -> None:
    """Leaves of a row what can stand in a batch and do nothing there: at least one token (id 0) of each part."""
    prompt, response = output["prompt_token_ids"][row] or [0], output["response_ids"][row] or [0]
    if limits is not None:
        prompt = prompt[: limits.max_input_length]
        response = response[: limits.max_response_length(len(prompt))]
    length = len(response)
    output["prompt_token_ids"][row], output["response_ids"][row] = prompt, response
    output["loss_masks"][row] = [0] * length
    rewards: list[Any] = output["rewards"]
    rewards[row] = [0.0] * length if isinstance(rewards[row], list) else 0.0
    if output["stop_reasons"] is not None:
        output["stop_reasons"][row] = "error"
    if output["rollout_logprobs"] is not None:
        output["rollout_logprobs"][row] = [0.0] * length
    if (versions := output.get("weight_versions")) is not None:
        versions[row] = [NOT_WRITTEN] * length
