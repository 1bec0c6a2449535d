"""Generator of concurrent trajectories in skyrl_gym environments: retries attempts after infrastructure failures,
records other failures, and returns trajectory groups."""

import asyncio
import contextlib
import copy
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

import skyrl_gym
from skyrl_gym.concurrency import raise_first_error
from skyrl_gym.waits import waiting
from skyrl_train.errors import ConfigError, RolloutError, WorkerError
from skyrl_train.generators.agent_loop import EngineSession, LengthBudget, run_agent_loop
from skyrl_train.generators.base import (
    BatchMetadata,
    Failure,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
    get_trajectory_ids,
    report_groups,
)
from skyrl_train.generators.dialogue import (
    ConversationDialogue,
    Dialogue,
    RetokenizedDialogue,
    SingleMessageDialogue,
)
from skyrl_train.generators.environment import DaemonThreads, EnvironmentSession
from skyrl_train.generators.sampling import compute_episode_seed, compute_request_seed, get_sampling_params
from skyrl_train.generators.sessions import announced
from skyrl_train.generators.step_wise_dialogue import StepWiseDialogue
from skyrl_train.generators.tokenization import ChatFormat, ChatTemplateError
from skyrl_train.inference_engines.base import InferenceEngineInterface, SamplingKeywords
from skyrl_train.rollouts.adapter import to_generator_output
from skyrl_train.rollouts.filters import map_trajectories, mask_overlong, mask_unended, zero_reward_on_non_stop
from skyrl_train.rollouts.joining import merge_appending_turns
from skyrl_train.rollouts.metrics import compute_rollout_metrics
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, group_trajectories
from skyrl_train.types import ConversationType
from skyrl_train.utils.chat_templates import get_custom_chat_template
from skyrl_train.utils.progress import ANSWERS, progress
from skyrl_train.utils.tracebacks import format_last_location, log_traceback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import GeneratorConfig, SkyRLGymConfig

RETRY_DELAY_SECONDS = 0.5
"""Pause before the first retry of a rollout; doubled for each further one."""


@dataclass(frozen=True)
class RolloutRequest:
    """One trajectory to generate."""

    prompt: ConversationType
    env_class: str
    env_extras: dict[str, Any]
    sampling_params: SamplingKeywords
    trajectory_id: TrajectoryID
    metadata: BatchMetadata | None

    @property
    def session_id(self) -> str:
        """Session id of its requests to engines."""
        return self.trajectory_id.to_string()


class SkyRLGymGenerator(GeneratorInterface):
    """Generator that runs the agent loop for all prompts of a batch concurrently.

    Args:
        generator_cfg: `generator`.
        skyrl_gym_cfg: `environment.skyrl_gym`.
        inference_engine_client: an engine, or a client over several.
        tokenizer: tokenizer of the model.
        model_name: name of the model for log messages.

    Raises:
        ConfigError: inconsistent settings, or an unsupported chat template.
    """

    def __init__(
        self,
        generator_cfg: "GeneratorConfig",
        skyrl_gym_cfg: "SkyRLGymConfig",
        inference_engine_client: InferenceEngineInterface,
        tokenizer: "PreTrainedTokenizerBase",
        model_name: str,
    ) -> None:
        self.generator_cfg = generator_cfg
        self.skyrl_gym_cfg = skyrl_gym_cfg
        self.inference_engine_client = inference_engine_client
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.custom_chat_template = get_custom_chat_template(generator_cfg.chat_template)
        self.chat = ChatFormat(tokenizer, self.custom_chat_template, generator_cfg.chat_template_kwargs)
        self.retokenizes = (
            self.custom_chat_template is not None
            and generator_cfg.use_conversation_multi_turn
            and not generator_cfg.step_wise_trajectories
        )
        self._threads = DaemonThreads(skyrl_gym_cfg.max_env_workers, skyrl_gym_cfg.env_timeout_seconds)
        if self.retokenizes:
            self._check_retokenizing()
        if generator_cfg.step_wise_trajectories and not generator_cfg.use_conversation_multi_turn:
            raise ConfigError(
                "generator.step_wise_trajectories=true needs generator.use_conversation_multi_turn=true: with a "
                "single growing message, turns are not separate samples"
            )

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return the groups of `generate_groups` as columns; with `step_wise_trajectories`, one row per turn.

        Args:
            disable_tqdm: ignored, for compatibility with other SkyRL releases; see `trainer.show_progress`.
        """
        return to_generator_output(await self.generate_groups(input_batch, disable_tqdm))

    async def generate_groups(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> RolloutBatch:
        """Return one trajectory per prompt, in the order of the prompts; with `step_wise_trajectories`, its turns are
        separate samples. A failed trajectory is included with its failure and does not affect the batch or other
        trajectories.

        Raises:
            ConfigError: an environment id is not registered, or log-probs are requested although the conversation is
                retokenized at each turn (except for step-wise trajectories). Both are checked before generation.
            WorkerError: an engine's process crashed.
        """
        requests = self._build_requests(input_batch)
        sessions = [(request.trajectory_id, request.session_id) for request in requests]
        with raise_first_error(), announced(self.inference_engine_client, sessions):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate_trajectory(request)) for request in requests]
                if (on_group := input_batch.get("on_group")) is not None:
                    report_groups(tasks, input_batch, lambda own: on_group(*self._build_finished_groups(own).groups))
        return self._build_batch([task.result() for task in tasks])

    # -- one trajectory

    async def _generate_trajectory(self, request: RolloutRequest) -> Trajectory:
        """Generate a trajectory, restarted from its prompt with a new environment after an infrastructure failure."""
        num_retries, began = 0, time.time()
        while True:
            env, dialogue, session = (
                self._create_environment(request),
                self._create_dialogue(request),
                self._create_engine_session(request),
            )
            stop_reason, samples, env_metrics = "error", [], {}
            async with _collect_failures(env) as failures:
                prompt = copy.deepcopy(request.prompt)
                with waiting("an episode", who=f"sample {request.trajectory_id.to_string()}"):
                    stop_reason = await run_agent_loop(env, prompt, dialogue, session, self._get_length_budget(request))
                samples = dialogue.finish(stop_reason)
                env_metrics = await env.get_metrics()
            if (
                not failures
                or failures[0].kind != "infrastructure"
                or num_retries >= self.generator_cfg.max_rollout_retries
            ):
                break
            await asyncio.sleep(RETRY_DELAY_SECONDS * 2**num_retries)
            num_retries += 1
        if failures:
            samples, stop_reason, env_metrics = dialogue.to_failed_samples(), "error", {}
        progress.advance(ANSWERS)
        return Trajectory(
            id=request.trajectory_id,
            samples=[self._apply_limits(request, sample) for sample in samples],
            stop_reason=stop_reason,
            failure=failures[0] if failures else None,
            is_step_wise=self.generator_cfg.step_wise_trajectories,
            env_class=request.env_class,
            env_metrics=env_metrics,
            turn_lengths=session.turn_lengths,
            num_retries=num_retries,
            span=(began, time.time()),
        )

    def _create_environment(self, request: RolloutRequest) -> EnvironmentSession:
        extras = request.env_extras | {"max_turns": self.generator_cfg.max_turns}
        env_config = self.skyrl_gym_cfg.get_env_config(request.env_class)
        seed = compute_episode_seed(self._compute_seed(request), request.metadata, request.trajectory_id)
        return EnvironmentSession(self._threads, request.env_class, env_config, extras, seed)

    def _create_engine_session(self, request: RolloutRequest) -> EngineSession:
        seed, metadata, trajectory_id = self._compute_seed(request), request.metadata, request.trajectory_id
        return EngineSession(
            self.inference_engine_client,
            request.sampling_params,
            session_id=request.session_id,
            seed_of_turn=lambda turn: compute_request_seed(seed, metadata, trajectory_id, turn),
            timeout_seconds=self.generator_cfg.request_timeout_seconds,
        )

    def _get_length_budget(self, request: RolloutRequest) -> LengthBudget:
        cfg = self.generator_cfg
        return LengthBudget(
            max_input_length=cfg.max_input_length,
            max_tokens=request.sampling_params.get("max_tokens", cfg.sampling_params.max_generate_length),
            max_context_length=cfg.engine_init_kwargs.get("max_model_len"),
        )

    def _compute_seed(self, request: RolloutRequest) -> int:
        return request.sampling_params.get("seed", self.generator_cfg.seed)

    def _create_dialogue(self, request: RolloutRequest) -> Dialogue:
        if not self.generator_cfg.use_conversation_multi_turn:
            return SingleMessageDialogue(self.chat)
        stop = request.sampling_params.get("stop") or []
        conversation = partial(
            ConversationDialogue,
            self.chat,
            stop_strings=[stop] if isinstance(stop, str) else list(stop),
            append_eos_after_stop_string=self.generator_cfg.append_eos_token_after_stop_str_in_multi_turn,
        )
        if self.generator_cfg.step_wise_trajectories:
            return StepWiseDialogue(self.chat, conversation, renders_anew=self.custom_chat_template is not None)
        return RetokenizedDialogue(self.chat) if self.retokenizes else conversation()

    def _apply_limits(self, request: RolloutRequest, sample: TrainingSample) -> TrainingSample:
        """Truncate a prompt over the limit (the trajectory does not train), so that it does not widen the whole batch;
        use the dataset's prompt if the environment never started; drop log-probs that were not requested."""
        prompt_ids = sample.prompt_ids
        if not prompt_ids:
            try:
                prompt_ids = self.chat.ids(request.prompt, add_generation_prompt=True)
            except ChatTemplateError:  # already the trajectory's failure
                prompt_ids = self.chat.closing_ids
        has_log_probs = request.sampling_params.get("logprobs") is not None
        is_whole = len(prompt_ids) <= self.generator_cfg.max_input_length
        return replace(
            sample,
            prompt_ids=prompt_ids[: self.generator_cfg.max_input_length],
            log_probs=sample.log_probs if has_log_probs else None,
            routes=sample.routes if is_whole else None,  # they belong to positions in the whole sample
        )

    # -- a batch

    def _build_requests(self, input_batch: GeneratorInput) -> list[RolloutRequest]:
        num_prompts = len(input_batch["prompts"])
        params = input_batch.get("sampling_params") or get_sampling_params(self.generator_cfg.sampling_params)
        params = self.chat.turn_ends.add_stop_ids(params)
        ids = get_trajectory_ids(input_batch)
        extras = input_batch.get("env_extras") or [{} for _ in range(num_prompts)]
        self._check_env_classes(input_batch["env_classes"])
        if self.retokenizes and params.get("logprobs") is not None:
            raise self._make_no_logprobs_error("sampling_params.logprobs", params["logprobs"])
        columns = zip(input_batch["prompts"], input_batch["env_classes"], extras, ids, strict=True)
        metadata = input_batch.get("batch_metadata")
        return [
            RolloutRequest(prompt, env_class, extra or {}, params, trajectory_id, metadata)
            for prompt, env_class, extra, trajectory_id in columns
        ]

    def _build_batch(self, trajectories: list[Trajectory]) -> RolloutBatch:
        """Build the batch of trajectory groups. Metrics are computed before settings remove rewards or tokens."""
        self._log_failures(trajectories)
        return replace(self._build_finished_groups(trajectories), metrics=compute_rollout_metrics(trajectories))

    def _build_finished_groups(self, trajectories: list[Trajectory]) -> RolloutBatch:
        """Build groups of trajectories without the rewards, tokens and rows that settings remove."""
        cfg = self.generator_cfg
        batch = RolloutBatch(group_trajectories(trajectories), {})
        if cfg.zero_reward_on_non_stop:
            batch = map_trajectories(batch, zero_reward_on_non_stop)
        if cfg.apply_overlong_filtering and cfg.overlong_filtering_by == "end_token":
            batch = map_trajectories(batch, partial(mask_unended, end_token_id=self.chat.turn_ends.ids))
        elif cfg.apply_overlong_filtering:
            batch = map_trajectories(batch, mask_overlong)
        if cfg.merge_stepwise_output:
            batch = map_trajectories(batch, merge_appending_turns)
        return batch

    def _log_failures(self, trajectories: list[Trajectory]) -> None:
        failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
        if failures:
            counts = ", ".join(f"{count} {kind}" for kind, count in Counter(f.kind for f in failures).items())
            logger.warning(
                "{} of {} trajectories of {} failed ({}); the first: {}",
                len(failures), len(trajectories), self.model_name, counts, failures[0].message,
            )  # fmt: skip

    # -- checks before generation

    def _check_env_classes(self, env_classes: list[str]) -> None:
        for env_class in sorted(set(env_classes)):
            try:
                skyrl_gym.spec(env_class)
            except skyrl_gym.error.Error as error:
                raise ConfigError(
                    f"environment.env_class (or a dataset row's env_class) is {env_class!r}: {error}. Register custom "
                    "environments with skyrl_gym.register in the process that runs the generator"
                ) from error

    def _check_retokenizing(self) -> None:
        setting = "generator.chat_template.name_or_path"
        if not self.chat.marks_answers():
            raise ConfigError(
                f"{setting}={self.generator_cfg.chat_template.name_or_path!r} must put the model's text between {{% "
                "generation %} and {% endgeneration %}: with a custom template the conversation is tokenized "
                "again in each turn, and these blocks mark the model's tokens. They are not needed with "
                "generator.step_wise_trajectories=true"
            )
        for name in ("sampling_params", "eval_sampling_params"):
            logprobs = getattr(self.generator_cfg, name).logprobs
            if logprobs is not None:
                raise self._make_no_logprobs_error(f"generator.{name}.logprobs", logprobs)

    def _make_no_logprobs_error(self, setting: str, value: object) -> ConfigError:
        return ConfigError(
            f"{setting}={value!r} must be null with "
            f"generator.chat_template.name_or_path={self.generator_cfg.chat_template.name_or_path!r}: the "
            "conversation is tokenized again in each turn, so the log-probs would belong to different tokens. With "
            "generator.step_wise_trajectories=true every turn is trained on the tokens that the model saw, with "
            "their log-probs"
        )


@contextlib.asynccontextmanager
async def _collect_failures(env: EnvironmentSession) -> AsyncIterator[list[Failure]]:
    """Append errors of the block to the list instead of raising them, and always close the environment. The error of a
    crashed engine (WorkerError) is raised, since it ends the batch."""
    failures: list[Failure] = []
    try:
        yield failures
    except WorkerError:
        raise
    except Exception as error:  # any error becomes the failure of this trajectory only
        failures.append(_convert_to_failure(error))
    finally:
        try:
            await env.close()
        except RolloutError as error:
            failures.append(_convert_to_failure(error))


def _convert_to_failure(error: Exception) -> Failure:
    if error.__cause__ is not None or not isinstance(error, RolloutError):
        log_traceback(error)
    if isinstance(error, RolloutError):
        return Failure(error.kind, str(error))
    if isinstance(error, ChatTemplateError):  # the environment wrote the messages
        return Failure("environment", str(error))
    return Failure("infrastructure", f"{type(error).__name__}: {error}{format_last_location(error)}")
