"""Conversion between `GeneratorOutput` (the public format: columns of parallel lists) and trajectory groups."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NotRequired, TypedDict

from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.kept_tokens import KeptTokens
from skyrl_train.rollouts.metrics import MetricsOutput, compute_scores, concatenate
from skyrl_train.rollouts.types import (
    Failure,
    RolloutBatch,
    TrainingSample,
    Trajectory,
    TrajectoryID,
    group_trajectories,
)


class GeneratorOutput(TypedDict):
    """Output of a generator: B trajectories in the order of the input. With `is_last_step`, the rows are turns of B
    trajectories, in the order of the input and, within a trajectory, of the turns.

    `response_ids` is everything after the prompt (what the model and the environment wrote); `loss_masks` is 1 on the
    tokens the model wrote. Rewards are one float per trajectory, or one per response token.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, float] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise: every turn is a row of its own, and this is True on the last of its trajectory. Rows of a trajectory
    have the same `trajectory_ids`, stop reason and failure."""
    weight_versions: NotRequired[list[list[int]] | None]
    """Version of the weights that wrote each response token; -1 on tokens the model did not write."""
    expert_routes: NotRequired[list[ExpertRoutes | None] | None]
    """Experts of a mixture that the tokens of prompt and response went to in the engine."""
    kept_tokens: NotRequired[list[KeptTokens | None] | None]
    """Tokens that truncation kept when each response token was drawn."""
    failures: NotRequired[list[Failure | None] | None]
    """None for a trajectory that ended as it should. A failed one has loss mask 0 and enters no baseline."""


def to_rollout_batch(output: GeneratorOutput, prompts: Sequence[TrajectoryID]) -> RolloutBatch:
    """Convert a generator's columns to trajectory groups.

    Args:
        prompts: the sample requested at each position of the input; the instance id identifies the prompt.

    Raises:
        RuntimeError: there are no responses.
        ValueError: parallel lists differ in length, rows of a trajectory are not consecutive, or the number of
            trajectories differs from the number of prompts.
    """
    _check_columns(output, len(prompts))
    failures = output.get("failures") or [None] * len(output["response_ids"])
    stop_reasons = output["stop_reasons"] or [None] * len(output["response_ids"])
    ids, is_step_wise = output.get("trajectory_ids"), output.get("is_last_step") is not None
    trajectories = [
        Trajectory(
            id=prompt if ids is None else ids[rows[-1]],
            samples=[_sample(output, row) for row in rows],
            stop_reason=stop_reasons[rows[-1]],
            failure=next((failures[row] for row in rows if failures[row] is not None), None),
            is_step_wise=is_step_wise,
        )
        for prompt, rows in zip(prompts, _iter_rows_of_trajectories(output), strict=True)
    ]
    uids = [prompt.instance_id for prompt in prompts]
    return RolloutBatch(group_trajectories(trajectories, uids), dict(output["rollout_metrics"] or {}))


def to_generator_output(batch: RolloutBatch) -> GeneratorOutput:
    """Convert trajectory groups to the columns that user code reads."""
    rows = list(batch.rows())
    samples = [sample for *_, sample in rows]
    is_step_wise = any(trajectory.is_step_wise for _, trajectory, _ in rows)
    log_probs = [sample.log_probs for sample in samples if sample.log_probs is not None]
    versions = [sample.weight_versions for sample in samples if sample.weight_versions is not None]
    stop_reasons = [trajectory.stop_reason for _, trajectory, _ in rows if trajectory.stop_reason is not None]
    output = GeneratorOutput(
        prompt_token_ids=[sample.prompt_ids for sample in samples],
        response_ids=[sample.response_ids for sample in samples],
        rewards=[sample.rewards for sample in samples],
        loss_masks=[sample.loss_mask for sample in samples],
        stop_reasons=stop_reasons if len(stop_reasons) == len(rows) else None,
        rollout_metrics=batch.metrics,
        rollout_logprobs=log_probs if len(log_probs) == len(samples) else None,
        trajectory_ids=[trajectory.id for _, trajectory, _ in rows],
        is_last_step=[sample is trajectory.samples[-1] for _, trajectory, sample in rows] if is_step_wise else None,
        weight_versions=versions if len(versions) == len(samples) else None,
        failures=[trajectory.failure for _, trajectory, _ in rows],
    )
    if any(sample.routes is not None for sample in samples):
        output["expert_routes"] = [sample.routes for sample in samples]
    if any(sample.kept_tokens is not None for sample in samples):
        output["kept_tokens"] = [sample.kept_tokens for sample in samples]
    return output


def _sample(output: GeneratorOutput, row: int) -> TrainingSample:
    response, reward = output["response_ids"][row], output["rewards"][row]
    log_probs, versions = output["rollout_logprobs"], output.get("weight_versions")
    routes, kept = output.get("expert_routes"), output.get("kept_tokens")
    # A single reward stands on the last token. It may be no number at all: `record_faults` finds that.
    one_a_token = reward if isinstance(reward, list) else ([0.0] * (len(response) - 1) + [reward])[: len(response)]
    return TrainingSample(
        prompt_ids=output["prompt_token_ids"][row],
        response_ids=response,
        loss_mask=output["loss_masks"][row],
        rewards=one_a_token,
        log_probs=None if log_probs is None else log_probs[row],
        weight_versions=None if versions is None else versions[row],
        routes=None if routes is None else routes[row],
        kept_tokens=None if kept is None else kept[row],
    )


def _iter_rows_of_trajectories(output: GeneratorOutput) -> Iterator[range]:
    """Yield the rows of each trajectory, in order."""
    last_steps = output.get("is_last_step") or [True] * len(output["response_ids"])
    ends = [row + 1 for row, is_last in enumerate(last_steps) if is_last]
    return (range(start, end) for start, end in pairwise([0, *ends]))


def _check_columns(output: GeneratorOutput, num_prompts: int) -> None:
    responses = output["response_ids"]
    if not responses:
        raise RuntimeError("No outputs generated")
    num_trajectories = sum(1 for _ in _iter_rows_of_trajectories(output))
    if num_trajectories != num_prompts:
        raise ValueError(f"Mismatch between prompts ({num_prompts}) and responses ({num_trajectories})")
    for key, column in output.items():
        if isinstance(column, list) and len(column) != len(responses):
            raise ValueError(
                f"Generator output {key} length must be equal to response_ids length: {len(column)} != {len(responses)}"
            )
    _check_steps(output)
    _check_token_columns(output)


def _check_steps(output: GeneratorOutput) -> None:
    """Check that the rows of a trajectory are consecutive, and that `is_last_step` is True on the last."""
    last_steps, ids = output.get("is_last_step"), output.get("trajectory_ids")
    if last_steps is None:
        return
    if ids is None:
        raise ValueError("is_last_step needs trajectory_ids, which identify the rows of a trajectory")
    for row, is_last in enumerate(last_steps):
        ends = row + 1 == len(ids) or ids[row + 1] != ids[row]
        if ends != is_last:
            raise ValueError(
                f"is_last_step is {is_last} in row {row} of trajectory {ids[row].to_string()}; it must be True in the "
                "last row of a trajectory and nowhere else, and the rows of a trajectory must be consecutive"
            )
    if len(set(ids)) != sum(last_steps):
        raise ValueError(
            "the rows of a trajectory must be consecutive, and trajectory_ids must differ between trajectories"
        )


def _check_token_columns(output: GeneratorOutput) -> None:
    lengths = [len(ids) for ids in output["response_ids"]]
    columns: dict[str, Sequence[Sequence[float]] | None] = {
        "loss masks": output["loss_masks"],
        "rollout logprobs": output["rollout_logprobs"],
        "weight versions": output.get("weight_versions"),
    }
    for name, column in columns.items():
        for i, values in enumerate(column or []):
            if len(values) != lengths[i]:
                raise ValueError(
                    f"Response ids and {name} must have the same length; trajectory {i}: {lengths[i]} and {len(values)}"
                )
    per_token = [isinstance(reward, list) for reward in output["rewards"]]
    if any(per_token) != all(per_token):
        raise ValueError("rewards must be `List[float]` or `List[List[float]]`, not a mix of both")
    for i, reward in enumerate(output["rewards"]):
        if isinstance(reward, list) and len(reward) != lengths[i]:
            raise ValueError(
                "Token rewards and response ids must have the same length; "
                f"trajectory {i}: {len(reward)} and {lengths[i]}"
            )


# ---- columns to columns, for users' generators


def concatenate_generator_outputs(generator_outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Concatenate several outputs in order; metrics are combined by `metrics.concatenate`."""
    batches = [to_rollout_batch(output, _generate_ids(output)) for output in generator_outputs]
    return to_generator_output(concatenate(batches))


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Compute the scores of the trajectories (`metrics.compute_scores`).

    Args:
        uids: the prompt of each row.

    Raises:
        ValueError: no rows, or a number of uids other than one per row.
    """
    rewards = generator_output["rewards"]
    if len(rewards) != len(uids):
        raise ValueError(f"there must be one uid per row; got {len(uids)} uids for {len(rewards)} rows")
    if not rewards:
        raise ValueError("no trajectories to score: rewards is empty")
    prompts = [TrajectoryID(uids[rows.start], 0) for rows in _iter_rows_of_trajectories(generator_output)]
    return compute_scores(to_rollout_batch(generator_output, prompts).groups)


def validate_generator_output(num_prompts: int, generator_output: GeneratorOutput) -> None:
    """Check that the columns are consistent and match the number of prompts. Raises the errors of
    `to_rollout_batch`."""
    _check_columns(generator_output, num_prompts)


def _generate_ids(output: GeneratorOutput) -> list[TrajectoryID]:
    """Return an id for each trajectory, generated where the output has no ids."""
    ids = output.get("trajectory_ids")
    rows = list(_iter_rows_of_trajectories(output))
    return [TrajectoryID(str(number), 0) if ids is None else ids[own[-1]] for number, own in enumerate(rows)]
