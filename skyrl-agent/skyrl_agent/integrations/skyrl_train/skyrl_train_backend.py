"""Adapter to skyrl-train: its inference engines as the model, its trainers as consumers of training rows."""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import groupby

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.errors import AgentError, BackendError, InfraError, UnavailableError
from skyrl_agent.errors import ConfigError as AgentConfigError
from skyrl_agent.integrations.base import (
    Backend,
    BackendSettings,
    TrainingRows,
    compute_turn_seed,
    decode_response,
    read_settings,
)
from skyrl_agent.runner import AgentRunner
from skyrl_agent.types import MetaInfo, Row, SamplingParams, Tokenizer
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.errors import ConfigError, FailureKind, RolloutError, WorkerError
from skyrl_train.generators.base import (
    Failure,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
    get_trajectory_ids,
)
from skyrl_train.generators.sampling import compute_episode_seed
from skyrl_train.inference_engines.base import GenerationRequest, InferenceEngineInterface
from skyrl_train.rollouts.adapter import to_generator_output
from skyrl_train.rollouts.metrics import compute_token_metrics
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, group_trajectories

__all__ = ["BACKEND", "SkyRLAgentGenerator", "SkyRLBackend"]


class SkyRLBackend:
    """An engine of skyrl-train, or its client over many.

    Args:
        infer_engine: None if no completions are requested.
    """

    def __init__(
        self, infer_engine: InferenceEngineInterface | None, tokenizer: Tokenizer, cfg: Row | None = None
    ) -> None:
        read_settings(BackendSettings, cfg or {})
        self.engine, self.tokenizer = infer_engine, tokenizer
        self.broken: asyncio.Future[WorkerError] | None = None
        """Future that receives the error of engines that cannot be restarted."""

    def announced(self, groups: Sequence[Sequence[str]]) -> AbstractContextManager[None]:
        assert self.engine is not None
        return self.engine.announced(groups)

    async def async_generate_ids(
        self, *, input_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> tuple[str, MetaInfo]:
        assert self.engine is not None
        params = {"logprobs": 0, **sampling_params}
        if params.get("seed") is not None:
            params["seed"] = compute_turn_seed(params["seed"], input_ids)
        request = GenerationRequest(prompt_token_ids=input_ids, sampling_params=params, session_id=request_id)
        try:
            completion = await self.engine.generate(request)
        except WorkerError as error:
            if self.broken is not None and not self.broken.done():
                self.broken.set_result(error)
            raise InfraError(f"the engines failed: {error}") from error
        except RolloutError as error:
            kind = InfraError if error.kind == "infrastructure" else BackendError
            raise kind(f"the engine failed: {error}") from error
        except ValueError as error:
            raise BackendError(f"the engine refused the request: {error}") from error
        except Exception as error:  # the engine may be a Ray actor, an HTTP server or a library
            raise InfraError(f"the engine raised {type(error).__name__}: {error}") from error
        reason, ids = completion.stop_reason, completion.token_ids
        if reason == "abort":
            raise InfraError("the engine aborted the request")
        return decode_response(self.tokenizer, ids, reason), MetaInfo(
            output_tokens=ids,
            finish_reason=reason,
            logprobs=completion.log_probs,
            weight_versions=completion.weight_versions,
        )


class SkyRLAgentGenerator(GeneratorInterface):
    """Generator of skyrl-train that runs a task file's agent on the trainer's engines. The file's backend is ignored.
    Batches may run concurrently.

    The task file's sampling parameters and number of trajectories override the trainer's. A trajectory has one row for
    each stretch of turns that only append; its reward is on the last.

    Args:
        generator_cfg: `generator` of the trainer, with `task`.
        llm_endpoint_client: the engines; None to only validate the settings.

    Raises:
        ConfigError: the task file, or a setting of the trainer that contradicts it.
    """

    def __init__(
        self, generator_cfg: GeneratorConfig, llm_endpoint_client: InferenceEngineInterface | None, tokenizer: Tokenizer
    ) -> None:
        self.generator_cfg = generator_cfg
        try:
            self.runner: AgentRunner = AutoAgentRunner.from_task(
                generator_cfg.task or "", llm_endpoint_client, tokenizer, infer_backend="skyrl-train"
            )
        except (AgentError, OSError) as error:
            raise ConfigError(f"generator.task={generator_cfg.task}: {error}") from error
        self._check()

    def check_rows(self, rows: Sequence[Row], setting: str) -> None:
        """Check rows of a dataset, which a setting of the trainer names, and what they need, before anything starts.

        Raises:
            ConfigError: the task cannot use a row, or a server, sandbox or daemon that it needs does not work.
        """
        try:
            instances = self.runner.instances(rows)
        except AgentError as error:
            raise ConfigError(f"{setting} does not fit generator.task={self.generator_cfg.task}: {error}") from error
        try:
            with ThreadPoolExecutor(1) as thread:  # the caller may already run an event loop
                thread.submit(asyncio.run, self.runner.probe(instances)).result()
        except UnavailableError as error:
            raise ConfigError(f"generator.task={self.generator_cfg.task}: {error}") from error

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the groups of `generate_groups` as columns."""
        return to_generator_output(await self.generate_groups(input_batch))

    async def generate_groups(self, input_batch: GeneratorInput) -> RolloutBatch:
        """Run the agent on each prompt.

        Raises:
            TaskRowError: a row lacks a field; nothing was started.
            ConfigError: an invalid setting found by a trajectory, or an unavailable service.
            WorkerError: the engines failed permanently.
        """
        ids = get_trajectory_ids(input_batch)
        metadata = input_batch.get("batch_metadata")
        seed = compute_episode_seed(self.generator_cfg.seed, metadata, TrajectoryID("agents", 0))
        work = self.runner.rows(
            build_instance_rows(input_batch),
            val_mode=metadata is not None and metadata.training_phase == "eval",
            num_trajectories=_count_samples(ids),
            sampling_params={**(input_batch.get("sampling_params") or {}), "seed": seed},
        )
        return build_rollout_batch(await self._raise_if_engines_fail(work), ids)

    async def _raise_if_engines_fail(self, work: Coroutine[object, None, TrainingRows]) -> TrainingRows:
        """Cancel the batch when the engines fail permanently, rather than wait for each trajectory to fail."""
        backend = self.runner.infer_engine
        broken = asyncio.get_running_loop().create_future()
        if isinstance(backend, SkyRLBackend):
            if backend.broken is None or backend.broken.done():
                backend.broken = broken
            broken = backend.broken
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise broken.result()
            return task.result()
        except (AgentConfigError, UnavailableError) as error:
            raise ConfigError(f"generator.task={self.generator_cfg.task}: {error}") from error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _check(self) -> None:
        """Check that settings of the task file and of the trainer agree."""
        cfg, task = self.generator_cfg, self.runner.cfg.generator
        for val_mode, name, samples in (
            (False, "n_samples_per_prompt", cfg.n_samples_per_prompt),
            (True, "eval_n_samples_per_prompt", cfg.eval_n_samples_per_prompt),
        ):
            section = task.val_config if val_mode else task
            said = section.num_trajectories if "num_trajectories" in section.model_fields_set else None
            if said not in (None, samples):
                raise ConfigError(
                    f"generator.{name}={samples} must equal num_trajectories of the task file {cfg.task}, "
                    f"which is {said}"
                )
        temperature = task.sampling_params.get("temperature")
        if temperature not in (None, cfg.sampling_params.temperature):
            raise ConfigError(
                f"generator.sampling_params.temperature={cfg.sampling_params.temperature} must be what the task file "
                f"{cfg.task} says ({temperature}): the trainer computes log-probs at it"
            )


def build_instance_rows(batch: GeneratorInput) -> list[Row]:
    """Return one row per instance, with `prompt` and `env_class`, which the dataset had split off, restored."""
    num = len(batch["prompts"])
    ids = get_trajectory_ids(batch)
    extras = batch.get("env_extras") or [{} for _ in range(num)]
    firsts = [next(group)[0] for _, group in groupby(enumerate(ids), key=lambda item: item[1].instance_id)]
    return [{**(extras[i] or {}), "prompt": batch["prompts"][i], "env_class": batch["env_classes"][i]} for i in firsts]


def _count_samples(ids: Sequence[TrajectoryID]) -> int:
    counts = {len(list(group)) for _, group in groupby(ids, key=lambda trajectory_id: trajectory_id.instance_id)}
    if len(counts) != 1:
        raise ValueError(f"every prompt must have the same number of samples; got {sorted(counts)}")
    return counts.pop()


def build_rollout_batch(rows: TrainingRows, ids: Sequence[TrajectoryID] | None = None) -> RolloutBatch:
    """Return training rows as step-wise trajectories, whatever their number of rows.

    Args:
        ids: [T]; none: of the rows' instance and trajectory.
    """
    if ids is None:
        ids = [TrajectoryID(str(group), n) for group, n in zip(rows.groups, rows.trajectory_ids, strict=True)]
    samples: list[list[TrainingSample]] = [[] for _ in ids]
    for row, number in enumerate(rows.row_trajectory):
        samples[number].append(_sample(rows, row))
    trajectories = [
        Trajectory(id_, samples[number], rows.finish_reasons[number], _convert_failure(rows, number), is_step_wise=True)
        for number, id_ in enumerate(ids)
    ]
    return RolloutBatch(group_trajectories(trajectories), rows.rollout_metrics | compute_token_metrics(trajectories))


def _sample(rows: TrainingRows, row: int) -> TrainingSample:
    """Return one row. The trajectory's reward is assigned to the last token of its last row."""
    response = rows.response_ids[row]
    reward = rows.rewards[row] if rows.is_last_episode[row] else 0.0
    return TrainingSample(
        prompt_ids=rows.prompt_token_ids[row],
        response_ids=response,
        loss_mask=rows.loss_masks[row],
        rewards=[0.0] * (len(response) - 1) + [float(reward)],
        log_probs=None if rows.rollout_logprobs is None else rows.rollout_logprobs[row],
        weight_versions=None if rows.weight_versions is None else rows.weight_versions[row],
    )


def build_generator_output(rows: TrainingRows) -> GeneratorOutput:
    """Return training rows as the columns that `AgentRunner.run` gives for this backend."""
    return to_generator_output(build_rollout_batch(rows))


def _convert_failure(rows: TrainingRows, number: int) -> Failure | None:
    """Convert a trajectory outside the baseline to the trainer's failure."""
    if rows.in_baseline[number]:
        return None
    failure = rows.failures[number]
    if failure is None:
        return Failure("infrastructure", f"it finished with {rows.finish_reasons[number]}")
    kind: FailureKind = failure.kind
    return Failure(kind, f"{failure.stage}: {failure.message}")


BACKEND = Backend(make=SkyRLBackend, rows_of=build_instance_rows, output_of=build_generator_output)
