"""Generator that produces trajectories with an agent harness: a program that sends requests to the endpoint."""

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

from skyrl_gym.concurrency import raise_first_error
from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Sandbox
from skyrl_gym.sandbox.environment import check_variables
from skyrl_gym.waits import waiting
from skyrl_train.endpoint.recorder import SessionRules
from skyrl_train.endpoint.session_endpoint import Endpoint, SharedEndpoint
from skyrl_train.errors import ConfigError, RolloutError, WorkerError
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
from skyrl_train.generators.environment import DaemonThreads, DeadlineExceeded
from skyrl_train.generators.harness.run import (
    KINDS,
    Attempt,
    Harness,
    get_output_end,
    load_function,
    make_harness_failure,
)
from skyrl_train.generators.harness.task import (
    TASK_FOLDER,
    HarnessTask,
    check_prompt,
    check_row,
    check_task_fits,
    get_last_text,
)
from skyrl_train.generators.recorded import build_recorded_trajectory, compute_recorded_metrics
from skyrl_train.generators.sampling import compute_request_seed, get_sampling_params
from skyrl_train.generators.sessions import announced
from skyrl_train.inference_engines.base import InferenceEngineInterface, SamplingKeywords
from skyrl_train.rollouts.adapter import to_generator_output
from skyrl_train.rollouts.metrics import compute_rollout_metrics
from skyrl_train.rollouts.types import RolloutBatch, Trajectory, group_trajectories
from skyrl_train.utils.progress import ANSWERS, progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import GeneratorConfig
    from skyrl_train.types import ConversationType

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OTHER_DISTRIBUTIONS = ("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "ignore_eos")
"""Keywords of requests by which answers would not be drawn from the policy that trains."""
_FURTHER_SECONDS = 120.0
_RETRY_SECONDS = 0.5


class HarnessGenerator(GeneratorInterface):
    """Generator that runs `generator.harness` once per trajectory, against a dedicated endpoint for the trainer's
    engines. Batches may run concurrently.

    Args:
        cfg: `generator`.
        client: an engine, or a client over several; None to only check the settings.

    Raises:
        ConfigError: a function or grader cannot be imported, or a variable cannot be passed to a sandbox.
    """

    def __init__(
        self, cfg: "GeneratorConfig", client: InferenceEngineInterface | None, tokenizer: "PreTrainedTokenizerBase"
    ) -> None:
        self.generator_cfg = cfg
        harness = cfg.harness
        self._client = client
        self._harness = partial(
            Harness,
            harness,
            load_function("generator.harness.function", harness.function),
            load_function("generator.harness.grader", harness.grader),
        )
        if harness.sandbox != "process":
            try:
                check_variables(harness.env)
            except ValueError as error:
                raise ConfigError(f"generator.harness.env: {error}") from None
        self._endpoint = None if client is None else SharedEndpoint(cfg, client, tokenizer)
        seconds = harness.deadline_seconds + harness.grade_seconds + _FURTHER_SECONDS
        self._threads = DaemonThreads(harness.max_parallel, seconds)

    def check_rows(self, rows: Any, setting: str) -> None:
        """Check that a sandbox works, and that each row of a dataset is valid and has a reward.

        Raises:
            ConfigError: neither the settings nor a row have a grader; a prompt, `files` or `grade` is invalid; the
                sandbox does not work on this machine.
        """
        harness = self.generator_cfg.harness
        for number, row in enumerate(rows):
            if harness.grader is None and harness.function is None and not row.get("grade"):
                raise ConfigError(
                    f"row {number} of {setting} has no column `grade` (command, files) and generator.harness.grader "
                    "is null, so its trajectories would have no reward. Set one of them"
                )
            try:
                check_row(row, with_grade=harness.grader is None)
                check_prompt(row.get("prompt"))
                check_task_fits(harness.command or (), get_last_text(row.get("prompt")))
            except ValueError as error:
                raise ConfigError(f"row {number} of {setting}: {error}") from error
        try:
            self._harness("").create_sandbox()
        except InfraError as error:
            raise ConfigError(f"generator.harness.sandbox={harness.sandbox} does not work here: {error}") from error

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the groups of `generate_groups` as columns."""
        return to_generator_output(await self.generate_groups(input_batch))

    async def generate_groups(self, input_batch: GeneratorInput) -> RolloutBatch:
        """Return one trajectory per prompt. A failed trajectory is included with its failure.

        Raises:
            WorkerError: the engines crashed and cannot be restarted.
        """
        assert self._endpoint is not None and self._client is not None, "built without engines, to validate settings"
        prompts, metadata = input_batch["prompts"], input_batch.get("batch_metadata")
        params = input_batch.get("sampling_params") or get_sampling_params(self.generator_cfg.sampling_params)
        extras = input_batch.get("env_extras") or [{} for _ in prompts]
        sessions = [(name, _create_session_name()) for name in get_trajectory_ids(input_batch)]
        graded_ends: dict[str, Failure] = {}
        async with self._endpoint.serve() as endpoint:
            with raise_first_error(), announced(self._client, sessions):
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(
                            self._generate_trajectory(
                                endpoint, prompt, extra or {}, params, name, session, metadata, graded_ends
                            )
                        )
                        for prompt, extra, (name, session) in zip(prompts, extras, sessions, strict=True)
                    ]
                    if (on_group := input_batch.get("on_group")) is not None:
                        report_groups(tasks, input_batch, lambda own: on_group(*group_trajectories(own)))
        return self._build_batch([task.result() for task in tasks], list(graded_ends.values()))

    async def _generate_trajectory(
        self,
        endpoint: Endpoint,
        prompt: "ConversationType",
        row: dict[str, Any],
        params: SamplingKeywords,
        name: TrajectoryID,
        session: str,
        metadata: BatchMetadata | None,
        graded_ends: dict[str, Failure],
    ) -> Trajectory:
        """Generate a trajectory, restarted in a new session after an infrastructure failure. If it is graded although
        its program crashed, its end is added to `graded_ends`."""
        began, num_retries = time.time(), 0
        rules = self._get_rules(params, name, metadata)
        while True:
            with waiting("a harness", who=f"sample {name.to_string()}"):
                attempt = await self._run_attempt(endpoint, prompt, row, session, rules)
            failed = attempt.failure is not None
            if failed:
                await self._raise_if_engines_died()
            again = attempt.failure is not None and attempt.failure.kind == "infrastructure"
            if not again or num_retries >= self.generator_cfg.max_rollout_retries:
                break
            await asyncio.sleep(_RETRY_SECONDS * 2**num_retries)
            num_retries, session = num_retries + 1, _create_session_name()
        progress.advance(ANSWERS)
        if attempt.graded_end is not None:
            graded_ends[name.to_string()] = attempt.graded_end
        temperature = None if params.get("temperature") is None else float(params["temperature"])
        trajectory = build_recorded_trajectory(attempt.record, attempt.reward, name, temperature, attempt.failure)
        return _describe(trajectory, attempt, num_retries, (began, time.time()))

    async def _run_attempt(
        self, endpoint: Endpoint, prompt: "ConversationType", row: dict[str, Any], session: str, rules: SessionRules
    ) -> Attempt:
        endpoint.recorder.begin(session, rules)
        close = partial(endpoint.recorder.take_record, session)
        harness: Harness = self._harness(endpoint.socket_path)
        # In the endpoint's folder: it keeps other users out, and is removed after kill -9.
        place = os.path.dirname(endpoint.socket_path)
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="task-", dir=place))
                task = HarnessTask(
                    prompt=prompt,
                    row=row,
                    base_url=harness.get_base_url(endpoint.server.session_url(session)),
                    api_key=endpoint.server.session_key(session),
                    model=endpoint.model,
                    sandbox=harness.create_sandbox(folder),
                    deadline_seconds=self.generator_cfg.harness.deadline_seconds,
                    folder=folder if self.generator_cfg.harness.sandbox == "process" else TASK_FOLDER,
                )
                task.write_texts(folder)
            except (InfraError, OSError) as error:  # OSError: a full disk
                return Attempt(close(), failure=Failure("infrastructure", f"no sandbox: {error}"))
            except RolloutError as error:
                return Attempt(close(), failure=Failure(error.kind, str(error)))
            try:
                return await self._threads.call(harness.run_attempt, task, close)
            except DeadlineExceeded as error:
                return Attempt(close(), failure=make_harness_failure("hung", f"it could not be terminated: it {error}"))
            finally:
                close()  # what is left of a cancelled one
                await asyncio.to_thread(_close, task.sandbox)

    def _get_rules(self, params: SamplingKeywords, name: TrajectoryID, metadata: BatchMetadata | None) -> SessionRules:
        cfg = self.generator_cfg
        seed = params.get("seed", cfg.seed)
        by_trainer = cfg.harness.sampling == "trainer"
        return SessionRules(
            sampling={key: params[key] for key in _SAMPLING if key in params} if by_trainer else {},
            ignored=_OTHER_DISTRIBUTIONS if by_trainer else (),
            seed_of_turn=(lambda turn: compute_request_seed(seed, metadata, name, turn)) if by_trainer else None,
            max_turns=cfg.harness.max_turns,
            max_tokens=cfg.harness.max_tokens,
            max_tokens_per_turn=params.get("max_tokens"),
        )

    async def _raise_if_engines_died(self) -> None:
        """Raise the error of engines that cannot be restarted, since all further trajectories would fail."""
        assert self._client is not None
        try:
            await self._client.check_health()
        except WorkerError:
            raise
        except Exception as error:  # an engine that is being restarted; the failure is recorded already
            logger.warning(f"a harness failed while an engine was unhealthy: {error}")

    def _build_batch(self, trajectories: list[Trajectory], graded_ends: list[Failure]) -> RolloutBatch:
        is_each_crashed = len(graded_ends) == len(trajectories) and not any(each.reward for each in trajectories)
        if graded_ends and is_each_crashed and len(group_trajectories(trajectories)) == 1:
            # One prompt (fully asynchronous runs generate them one by one): the policy may have caused it, and must not
            # take its own bad grades away.
            logger.warning("all {} harness programs of a prompt crashed: {}", len(trajectories), graded_ends[0].message)
        elif graded_ends and is_each_crashed:
            # More likely a harness that does not work than a policy that makes each of its programs crash.
            trajectories = [replace(each, failure=graded_ends[0]) for each in trajectories]
            graded_ends = []
        failures = [each.failure for each in trajectories if each.failure is not None]
        if failures:
            logger.warning(
                "{} of {} harnesses failed; the first: {}", len(failures), len(trajectories), failures[0].message
            )
        ends = Counter(map(get_output_end, [*failures, *graded_ends]))
        metrics = compute_rollout_metrics(trajectories) | compute_recorded_metrics(trajectories)
        return RolloutBatch(
            group_trajectories(trajectories), metrics | {f"harness/num_{end}": float(ends[end]) for end in KINDS}
        )


def _create_session_name() -> str:
    """Return an unguessable name, so that a harness has access only to the URL and key of its trajectory."""
    return secrets.token_hex(8)


def _close(sandbox: Sandbox) -> None:
    """Close a sandbox. A failure to close it does not affect other trajectories."""
    try:
        sandbox.close()
    except InfraError as error:
        logger.warning(f"the sandbox of a harness could not be closed and remains until this process exits: {error}")


def _describe(trajectory: Trajectory, attempt: Attempt, num_retries: int, span: tuple[float, float]) -> Trajectory:
    stop_reason = trajectory.stop_reason
    if attempt.failure is None and attempt.record.used_up is not None:
        stop_reason = "length"
    return replace(
        trajectory,
        stop_reason=stop_reason,
        env_class="harness",
        num_retries=num_retries,
        span=span,
        program_output=attempt.output,
    )
