"""Batches on their way into and out of a generator: prepared, joined, checked."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from loguru import logger

from skyrl_train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryID,
)
from skyrl_train.generators.faults import LengthLimits, record_faults
from skyrl_train.generators.metrics import get_rollout_metrics
from skyrl_train.generators.step_wise import rows_of_trajectories, whole_trajectories


def prepare_generator_input(
    prompts: list[dict[str, Any]],
    n_samples_per_prompt: int,
    sampling_params: dict[str, Any] | None,
    default_env_class: str | None,
    training_phase: TrainingPhase,
    global_step: int | None,
) -> tuple[GeneratorInput, list[str]]:
    """What a generator takes, made of dataset rows (`prompt`, `env_class`, `env_extras`, `uid`).

    Every prompt stands `n_samples_per_prompt` times in a row.

    Returns:
        The input, and the uid of the prompt behind each of its entries.
    """
    samples = [(row, repetition) for row in prompts for repetition in range(n_samples_per_prompt)]
    uids = [row["uid"] for row, _ in samples]
    generator_input = GeneratorInput(
        prompts=[row["prompt"] for row, _ in samples],
        env_classes=[row["env_class"] or default_env_class or "" for row, _ in samples],
        env_extras=[row["env_extras"] for row, _ in samples],
        sampling_params=sampling_params,
        trajectory_ids=[TrajectoryID(row["uid"], repetition) for row, repetition in samples],
        batch_metadata=BatchMetadata(global_step=global_step, training_phase=training_phase),
    )
    return generator_input, uids


def concatenate_generator_outputs(generator_outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Several outputs as one, in their order.

    The `generate/` metrics are computed anew (counts are added up), others are averaged with the number of trajectories
    as weight.

    Raises:
        ValueError: no outputs, or a column that some have and some lack (log-probs, for example).
    """
    if not generator_outputs:
        raise ValueError("there are no generator outputs to concatenate")
    keys = {key for output in generator_outputs for key, value in output.items() if value is not None}
    joined: dict[str, Any] = {key: None for output in generator_outputs for key in output}
    for key in sorted(keys - {"rollout_metrics"}):
        columns = [output.get(key) for output in generator_outputs]
        if any(column is None for column in columns):
            missing = [i for i, column in enumerate(columns) if column is None]
            raise ValueError(
                f"cannot concatenate generator outputs: {key} is missing in number {missing}, others have it"
            )
        joined[key] = [value for column in columns for value in column]  # pyright: ignore[reportOptionalIterable]
    output = GeneratorOutput(**joined)
    validate_generator_output(len(rows_of_trajectories(output)), output)
    trajectories = whole_trajectories(output)
    output["rollout_metrics"] = _joined_metrics(generator_outputs) | get_rollout_metrics(
        trajectories["response_ids"],
        trajectories["rewards"],
        stop_reasons=trajectories.get("stop_reasons"),
        failures=trajectories.get("failures"),
    )
    return output


def _joined_metrics(generator_outputs: Sequence[GeneratorOutput]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    weights: defaultdict[str, list[int]] = defaultdict(list)
    for output in generator_outputs:
        for key, value in (output["rollout_metrics"] or {}).items():
            if value is not None:  # a generator of one's own may say so of the mean of nothing
                values[key].append(value)
                weights[key].append(len(rows_of_trajectories(output)))
    return {
        key: float(sum(numbers))
        if key.startswith("generate/num_")
        else float(np.average(numbers, weights=weights[key]))
        for key, numbers in values.items()
    }


def validate_generator_output(
    num_prompts: int, generator_output: GeneratorOutput, limits: LengthLimits | None = None
) -> None:
    """Checks what a generator made before anything is computed from it.

    What is wrong with the output as a whole is an error. What is wrong with one trajectory (a reward that is NaN, a
    response over the limits) is recorded on it, in place: see `record_faults`.

    Raises:
        RuntimeError: there is no response at all.
        ValueError: lists that belong together differ in length, or rows of one trajectory do not stand together.
    """
    responses = generator_output["response_ids"]
    if not responses:
        raise RuntimeError("No outputs generated")
    num_trajectories = len(rows_of_trajectories(generator_output))
    if num_trajectories != num_prompts:
        raise ValueError(f"Mismatch between prompts ({num_prompts}) and responses ({num_trajectories})")
    for key, column in generator_output.items():
        if isinstance(column, list) and len(column) != len(responses):
            raise ValueError(
                f"Generator output {key} length must be equal to response_ids length: {len(column)} != {len(responses)}"
            )
    _check_steps(generator_output)
    _check_token_columns(generator_output)
    record_faults(generator_output, limits)
    if not any(any(loss_mask) for loss_mask in generator_output["loss_masks"]):
        logger.warning("the loss mask of every trajectory of this batch is zero: nothing will be learned from it")


def _check_steps(output: GeneratorOutput) -> None:
    """The rows of a trajectory stand together, and `is_last_step` is True on the last."""
    last_steps, ids = output.get("is_last_step"), output.get("trajectory_ids")
    if last_steps is None:
        return
    if ids is None:
        raise ValueError("is_last_step needs trajectory_ids: they say which rows belong together")
    for row, is_last in enumerate(last_steps):
        ends = row + 1 == len(ids) or ids[row + 1] != ids[row]
        if ends != is_last:
            raise ValueError(
                f"is_last_step is {is_last} in row {row} of trajectory {ids[row].to_string()}; it must be True in the "
                "last row of a trajectory and nowhere else, and the rows of a trajectory must stand together"
            )
    if len(set(ids)) != sum(last_steps):
        raise ValueError("the rows of a trajectory must stand together, and trajectory_ids must differ between them")


def _check_token_columns(output: GeneratorOutput) -> None:
    lengths = [len(ids) for ids in output["response_ids"]]
    columns = {
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
        raise ValueError("rewards must be `List[float]` or `List[List[float]]`, not some of each")
    for i, reward in enumerate(output["rewards"]):
        if isinstance(reward, list) and len(reward) != lengths[i]:
            raise ValueError(
                "Token rewards and response ids must have the same length; "
                f"trajectory {i}: {len(reward)} and {lengths[i]}"
            )
