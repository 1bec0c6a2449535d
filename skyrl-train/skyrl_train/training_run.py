"""Base of training runs: intervals, timings, metrics, checkpoints and exports around the steps."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_train.checkpoint_saver import CheckpointSaver
from skyrl_train.checkpoints import Checkpoint, CheckpointStore, extract_step_from_path
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.dataset.dataloader import Dataset
from skyrl_train.hooks import load_hooks
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.provenance import Change, Provenance, changes_between, check_changes, lines_of
from skyrl_train.run_record import describe_start
from skyrl_train.types import JsonObject
from skyrl_train.utils.gpu_monitor import load_metrics
from skyrl_train.utils.io import write_atomically
from skyrl_train.utils.progress import progress
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.stop_request import StopRequest
from skyrl_train.utils.storage import Place, check_access, location
from skyrl_train.utils.timer import Timer
from skyrl_train.utils.tracking import Tracking
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import Worker

T = TypeVar("T")

_SHOWN = {
    "wait_for_generation_buffer": "wait for groups",
    "fwd_logprobs_values_reward": "compute log-probs",
    "reference": "compute log-probs of the reference",
    "policy_train": "update the policy",
    "critic_train": "update the critic",
    "learn": "update the policy",
    "sync_weights": "sync the weights",
    "load_checkpoints": "load the checkpoint",
    "save_checkpoints": "save the checkpoint",
    "save_hf_model": "export the model",
}
"""Phases that the console shows, by the names of their timings. Generation and evaluation count their answers."""


class TrainingRun(ABC):
    """Base of training runs, for reinforcement learning and supervised training.

    Args:
        cfg: the validated settings.
        tracker: receives the metrics.
    """

    train_dataset: Dataset | None
    """Training data; its content is a part of the provenance of checkpoints."""

    def __init__(self, cfg: SkyRLConfig, tracker: Tracking, tokenizer: PreTrainedTokenizerBase):
        self.cfg = cfg
        self.tracker = tracker
        self.tokenizer = tokenizer
        self.run_folder = RunFolder(cfg.trainer.run_dir, compress=cfg.trainer.compress_trajectories)
        self.checkpoints = CheckpointStore(cfg.trainer.ckpt_path, cfg.trainer.max_ckpts_to_keep)
        self.saver = CheckpointSaver(
            self.checkpoints, in_background=cfg.trainer.ckpt_async, timeout_seconds=cfg.trainer.worker_timeout_seconds
        )
        self.hooks = [hook(self) for hook in load_hooks(cfg)]
        self.global_step = 0
        self.total_training_steps = 0
        self.all_metrics: dict[str, float | None] = {}
        self.all_timings: dict[str, float] = {}
        self.fingerprints: JsonObject = {}
        """Hashes of the step's batch and weights, for comparisons with other runs."""
        self.stop_request = StopRequest()
        self._saved_step = 0

    # ---- a subclass defines these

    @property
    @abstractmethod
    def trainable_groups(self) -> list[ActorGroup]:
        """Trained models, policy first."""

    @abstractmethod
    async def evaluate(self) -> None:
        """Compute the metrics of the evaluation set, if there is one."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of the run except models and step number, as JSON values."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state`."""

    async def save_more(self, folder: Path) -> None:  # noqa: B027  supervised training has nothing more
        """Write further files of a checkpoint."""

    async def load_more(self, folder: Path | None) -> None:  # noqa: B027
        """Load the files written by `save_more` from `folder`; None at a fresh start."""

    # ---- around a step

    async def after_step(self) -> None:
        """Evaluate, log, export and save a checkpoint, each at its interval. The checkpoint is last, so that a resumed
        run has nothing of this step left to do."""
        trainer = self.cfg.trainer
        await self.saver.raise_failure()
        await self._log_worker_load()
        for hook in self.hooks:
            await hook.on_step_end()
        if self.is_due(trainer.eval_interval):
            await self.evaluate()
        self.log()
        if self.is_due(trainer.hf_save_interval):
            await self.save_hf_model()
        if self.is_due(trainer.ckpt_interval):
            await self.save_checkpoint()
        if self.is_last_step():
            with self.timed("save_checkpoints"):
                await self.saver.wait()
        elif self.stop_request.is_made:
            await self._stop()

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Pass an error of the block to the hooks and raise it."""
        try:
            yield
        except Exception as error:
            for hook in self.hooks:
                try:
                    hook.on_error(error)
                except Exception as failure:  # user code; it must not replace the error of the run
                    logger.warning("{} failed in on_error: {!r}", type(hook).__name__, failure)
            raise

    async def start_hooks(self) -> None:
        """Call the hooks' `on_start` in a thread, since hooks may read model files."""
        for hook in self.hooks:
            await asyncio.to_thread(hook.on_start)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a part of a step that changes no model. If the run is asked to stop meanwhile, it ends with a
        checkpoint of the previous step."""
        task, stopped = asyncio.create_task(work), asyncio.create_task(self.stop_request.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            self.rewind_step()
            await self._stop()
        finally:
            task.cancel()
            stopped.cancel()

    def request_stop(self, reason: Exception) -> None:
        """End the run after this step, with a checkpoint and this error."""
        self.stop_request.make(reason)

    def rewind_step(self) -> None:
        """Return to the end of the previous step, if no model has changed since."""
        self.global_step -= 1

    async def _stop(self) -> NoReturn:
        """End the run on request, with a checkpoint of the last completed step."""
        if self._saved_step < self.global_step and self.cfg.trainer.ckpt_interval > 0:
            await self.save_checkpoint()
        await self.saver.wait()
        self.stop_request.end()

    async def _log_worker_load(self) -> None:
        """Advance the policy's profile by a step, and add GPU load to the metrics, if enabled."""
        trainer, policy = self.cfg.trainer, self.trainable_groups[0]
        if trainer.policy.torch_profiler_config.enable:
            await policy.call_all(PolicyWorker.end_profiled_step, self.global_step)
        if trainer.enable_ray_gpu_monitor and trainer.placement.device == "cuda":
            self.all_metrics |= load_metrics(await policy.call_all(PolicyWorker.take_gpu_load))

    def is_due(self, interval: int) -> bool:
        """Return True every `interval` steps and after the last step; never if the interval is not positive."""
        return interval > 0 and (self.global_step % interval == 0 or self.global_step == self.total_training_steps)

    def is_last_step(self) -> bool:
        """Return True in the last step of the run."""
        return self.global_step == self.total_training_steps

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the duration of a block as `timing/<name>`, and show the phase on the console."""
        with Timer(name, self.all_timings), progress.phase(_SHOWN.get(name)):
            yield

    def log(self) -> None:
        """Pass this step's metrics to hooks and tracker, and clear them."""
        for hook in self.hooks:
            hook.on_log()
        timings = {f"timing/{name}": seconds for name, seconds in self.all_timings.items()}
        self.write_fingerprints()
        self.tracker.log(self.all_metrics | timings, step=self.global_step, commit=True)
        self.all_metrics, self.all_timings = {}, {}
        progress.at_step(self.global_step, self.total_training_steps)

    def write_fingerprints(self) -> None:
        """Write the fingerprints recorded since the last call, if any."""
        if self.fingerprints:
            self.run_folder.append_fingerprints(self.global_step, self.fingerprints)
        self.fingerprints = {}

    # ---- checkpoints, exports

    @cached_property
    def provenance(self) -> Provenance:
        """Settings and data of this run, as recorded in its checkpoints."""
        return Provenance.of(self.cfg, self.train_dataset)

    async def save_checkpoint(self) -> None:
        """Save the complete state of the run atomically."""
        self._saved_step = self.global_step
        with self.timed("save_checkpoints"):
            await self.saver.wait()  # before the state is taken, so that the previous checkpoint is complete
            state = {"global_step": self.global_step, **self.state()}

            async def write_rest(folder: Path) -> None:
                await self.save_more(folder)
                self.provenance.write(folder)
                write_atomically(folder / "trainer_state.json", json.dumps(state))

            await self.saver.save(self.global_step, self.trainable_groups, write_rest, self.checkpoint_completed)

    def checkpoint_completed(self) -> None:  # noqa: B027  the journal of asynchronous training follows
        """Handle a completed checkpoint."""

    async def load_checkpoint(self) -> None:
        """Resume from the checkpoint selected by `resume_mode`, or start from scratch without one.

        Raises:
            ConfigError: it belongs to another experiment, or `resume_path` is not a checkpoint.
            CheckpointError: it is damaged.
        """
        changes = check_resumption(self.cfg.trainer, self.checkpoints, self.provenance)
        found = await asyncio.to_thread(self.checkpoints.find, self.cfg.trainer)
        if found is None:
            self.checkpoints.rename_later(than=None)
            await self.load_more(None)
            self.run_folder.delete_after(-1)
            self._start_record()
            return
        folder = found.folder
        with (
            self.timed("load_checkpoints"),
            found.local_copy(without=[group.name for group in self.trainable_groups]) as copy,
        ):
            state = json.loads((copy / "trainer_state.json").read_text())
            for group in self.trainable_groups:
                await load_group(group, found)
            await self.load_more(copy)
        self.checkpoints.rename_later(than=folder)
        self.load_state(state)
        self.global_step = extract_step_from_path(folder)
        self.run_folder.delete_after(self.global_step)
        self._start_record()
        for hook in self.hooks:
            hook.on_resume()
        logger.info(f"resumed after step {self.global_step} from {folder}")
        if changes:
            logger.warning(f"settings differ from those of that checkpoint:{lines_of(changes)}")
        if self.global_step >= self.total_training_steps:
            logger.info(finished_message(folder, self.total_training_steps))

    def _start_record(self) -> None:
        """Record the inputs of this start. From here on, a checkpoint can answer a stop request."""
        self._saved_step = self.global_step
        if self.cfg.trainer.ckpt_interval > 0:
            self.stop_request.accept(self.cfg.trainer.stop_timeout_seconds)
        start = describe_start(self.cfg, self.train_dataset, self.tokenizer)
        self.run_folder.append_start(self.global_step, start)
        progress.at_step(self.global_step, self.total_training_steps)

    async def save_hf_model(self) -> None:
        """Export the trained models in `transformers` format to `<export_path>/global_step_N/policy` (and `critic`)."""
        folder = location(self.cfg.trainer.export_path) / f"global_step_{self.global_step}"
        with self.timed("save_hf_model"):
            for group in self.trainable_groups:
                await group.call_all(Worker.save_hf_model, str(folder / group.name), self.tokenizer)


async def load_group(group: ActorGroup, checkpoint: Checkpoint) -> None:
    """Load a model and its optimizer on every rank. From an object store, each machine first fetches the files once.

    Raises:
        CheckpointError: the files are damaged or do not match the model.
    """
    folder = checkpoint.folder / group.name
    with checkpoint.naming_remedy():
        if not isinstance(folder, Path):
            await group.call_all(Worker.fetch_checkpoint, str(folder), checkpoint.records_of(group.name))
    await group.call_all(Worker.load_checkpoint, str(folder))


def num_training_steps(trainer: TrainerConfig, num_rows: int) -> int:
    """Return the number of steps of a run over `num_rows` rows of training data."""
    steps = num_rows // trainer.train_batch_size * trainer.epochs
    return min(steps, trainer.max_training_steps or steps)


def check_resumption(trainer: TrainerConfig, checkpoints: CheckpointStore, provenance: Provenance) -> list[Change]:
    """Compare a run with the checkpoint that it would resume, if there is one.

    Returns: the differences, all allowed.

    Raises:
        ConfigError: a difference defines another experiment, and `trainer.resume_allow_changes` is not set.
    """
    folder = checkpoints.select(trainer)
    if folder is None:
        return []
    origin = Provenance.read(folder)
    if origin is None:
        logger.warning(
            f"{folder} does not record its settings and data (written by an earlier release), so they are not "
            "compared with this run"
        )
        return []
    changes = changes_between(origin, provenance)
    check_changes(changes, folder, allowed=trainer.resume_allow_changes)
    return changes


def check_before_start(cfg: SkyRLConfig, dataset: Dataset | None) -> None:
    """Raise ConfigError before anything starts if a hook refuses the settings, an object store cannot be used, or the
    checkpoint to resume belongs to another experiment.

    Args:
        dataset: training data; None: the run only evaluates, without checkpoints.
    """
    check_access("trainer.export_path", cfg.trainer.export_path)
    for hook in load_hooks(cfg):
        hook.check_settings(cfg)
    if dataset is None:
        return
    check_access("trainer.ckpt_path", cfg.trainer.ckpt_path)
    store = CheckpointStore(cfg.trainer.ckpt_path)
    if store.select(cfg.trainer) is not None:
        check_resumption(cfg.trainer, store, Provenance.of(cfg, dataset))


def finished_message(folder: Place, total_steps: int) -> str:
    """Return the message for a run whose checkpoint in `folder` has the last step or a later one."""
    return (
        f"this run is finished: {folder} is the checkpoint of step {extract_step_from_path(folder)}, and these "
        f"settings end after step {total_steps}. To continue training, raise trainer.max_training_steps or "
        "trainer.epochs; to train from scratch, set trainer.resume_mode=none (which renames the checkpoints) or "
        "another trainer.run_name"
    )


def says_finished(cfg: SkyRLConfig, num_rows: int) -> bool:
    """Return True and log the reason if a run has nothing left to do. Reads only file names."""
    folder = CheckpointStore(cfg.trainer.ckpt_path).select(cfg.trainer)
    total = num_training_steps(cfg.trainer, num_rows)
    if folder is None or extract_step_from_path(folder) < total:
        return False
    logger.info(finished_message(folder, total))
    return True
