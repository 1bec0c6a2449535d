"""Conversion of dataset rows to the input of a generator."""

from skyrl_train.generators.base import BatchMetadata, GeneratorInput, TrainingPhase, TrajectoryID
from skyrl_train.inference_engines.base import SamplingKeywords
from skyrl_train.types import PromptRow


def prepare_generator_input(
    prompts: list[PromptRow],
    n_samples_per_prompt: int,
    sampling_params: SamplingKeywords | None,
    default_env_class: str | None,
    training_phase: TrainingPhase,
    global_step: int | None,
    *,
    sampling_seed: int | None = None,
    weight_version: int | None = None,
) -> tuple[GeneratorInput, list[str]]:
    """Build the input of a generator from dataset rows (`prompt`, `env_class`, `env_extras`, `uid`).

    Every prompt is repeated `n_samples_per_prompt` times consecutively.

    Args:
        global_step, sampling_seed, weight_version: see `BatchMetadata`.

    Returns:
        The input, and the prompt uid of each of its entries.
    """
    samples = [(row, repetition) for row in prompts for repetition in range(n_samples_per_prompt)]
    uids = [row["uid"] for row, _ in samples]
    generator_input = GeneratorInput(
        prompts=[row["prompt"] for row, _ in samples],
        env_classes=[row["env_class"] or default_env_class or "" for row, _ in samples],
        env_extras=[row["env_extras"] for row, _ in samples],
        sampling_params=sampling_params,
        trajectory_ids=[TrajectoryID(row["uid"], repetition) for row, repetition in samples],
        batch_metadata=BatchMetadata(global_step, training_phase, sampling_seed, weight_version),
    )
    return generator_input, uids
