"""What every run of training does around its steps: intervals, timings and metrics, checkpoints, exports."""

import asyncio
import json
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_train.checkpoints import CheckpointStore, check_all_seen, extract_step_from_path
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.dataset.dataloader import Dataset
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.provenance import Change, Provenance, changes_between, check_changes, lines_of
from skyrl_train.utils.io import expand_path, write_atomically
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.timer import Timer
from skyrl_train.utils.tracking import Tracking


class TrainingRun(ABC):
    """One run of training, of whatever kind.

    Args:
        cfg: the validated settings.
        tracker: where metrics go.
    """

    train_dataset: Dataset | None
    """Training data; its content is a part of the provenance of checkpoints."""

    def __init__(self, cfg: SkyRLConfig, tracker: Tracking, tokenizer: PreTrainedTokenizerBase):
        self.cfg = cfg
        self.tracker = tracker
        self.tokenizer = tokenizer
        self.run_folder = RunFolder(cfg.trainer.run_dir)
        self.checkpoints = CheckpointStore(cfg.trainer.ckpt_path, cfg.trainer.max_ckpts_to_keep)
        self.global_step = 0
        self.total_training_steps = 0
        self.all_metrics: dict[str, float | None] = {}
        self.all_timings: dict[str, float] = {}

    # ---- what a kind of training says of itself

    @property
    @abstractmethod
    def learners(self) -> list[ActorGroup]:
        """The models that learn, the policy first."""

    @abstractmethod
    async def evaluate(self) -> None:
        """Adds the metrics of the evaluation set; nothing without one."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the rest of the run depends on besides models and the step's number, as JSON takes it."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave."""

    async def save_more(self, folder: Path) -> None:  # noqa: B027  for most kinds there is nothing more
        """Writes what else belongs into a checkpoint."""

    async def load_more(self, folder: Path | None) -> None:  # noqa: B027
        """Takes up what `save_more` wrote; None at a fresh start."""

    # ---- around a step

    async def after_step(self) -> None:
        """Evaluates, logs, writes exports and checkpoints, each when it is due. The checkpoint comes last: a run that
        is resumed from it has nothing of this step left to do."""
        trainer = self.cfg.trainer
        if self.is_due(trainer.eval_interval):
            await self.evaluate()
        self.log()
        if self.is_due(trainer.hf_save_interval):
            await self.save_hf_model()
        if self.is_due(trainer.ckpt_interval):
            await self.save_checkpoint()

    def is_due(self, interval: int) -> bool:
        """Every `interval` steps and after the last one; never if the interval is not positive."""
        return interval > 0 and (self.global_step % interval == 0 or self.global_step == self.total_training_steps)

    def is_last_step(self) -> bool:
        return self.global_step == self.total_training_steps

    def timed(self, name: str) -> Timer:
        return Timer(name, self.all_timings)

    def log(self) -> None:
        """Hands this step's metrics over and starts the next step's."""
        timings = {f"timing/{name}": seconds for name, seconds in self.all_timings.items()}
        self.tracker.log(self.all_metrics | timings, step=self.global_step, commit=True)
        self.all_metrics, self.all_timings = {}, {}

    # ---- checkpoints, exports

    @cached_property
    def provenance(self) -> Provenance:
        """Settings and data of this run, as its checkpoints tell them."""
        return Provenance.of(self.cfg, self.train_dataset)

    async def save_checkpoint(self) -> None:
        """Everything that the rest of the run depends on, in one step or not at all."""
        state = {"global_step": self.global_step, **self.state()}
        with self.timed("save_checkpoints"), self.checkpoints.writing(self.global_step) as folder:
            for group in self.learners:
                reports = await group.call_all("save_checkpoint", str(folder / group.name))
                await asyncio.to_thread(check_all_seen, folder / group.name, group.name, reports)
            await self.save_more(folder)
            self.provenance.write(folder)
            write_atomically(folder / "trainer_state.json", json.dumps(state))

    async def load_checkpoint(self) -> None:
        """Goes on where the checkpoint that `resume_mode` asks for was written; a fresh start if there is none.

        Raises:
            ConfigError: it is of another experiment, or `resume_path` names none.
            CheckpointError: it is damaged.
        """
        changes = check_resumption(self.cfg.trainer, self.checkpoints, self.provenance)
        folder = await asyncio.to_thread(self.checkpoints.find, self.cfg.trainer)
        if folder is None:
            await self.load_more(None)
            self.run_folder.truncate_after(-1)
            return
        with self.timed("load_checkpoints"):
            state = json.loads((folder / "trainer_state.json").read_text())
            for group in self.learners:
                await group.call_all("load_checkpoint", str(folder / group.name))
            await self.load_more(folder)
        self.load_state(state)
        self.global_step = extract_step_from_path(folder)
        self.run_folder.truncate_after(self.global_step)
        logger.info(f"going on after step {self.global_step}, from {folder}")
        if changes:
            logger.warning(f"settings are not those of that checkpoint:{lines_of(changes)}")
        if self.global_step >= self.total_training_steps:
            logger.info(finished_message(folder, self.total_training_steps))

    async def save_hf_model(self) -> None:
        """Writes what learns as `transformers` loads it, to `<export_path>/global_step_N/policy` (and `critic`)."""
        folder = expand_path(self.cfg.trainer.export_path) / f"global_step_{self.global_step}"
        with self.timed("save_hf_model"):
            for group in self.learners:
                await group.call_all("save_hf_model", str(folder / group.name), self.tokenizer)


def num_training_steps(trainer: TrainerConfig, num_rows: int) -> int:
    """Return the number of steps of a run over so many rows of training data."""
    steps = num_rows // trainer.train_batch_size * trainer.epochs
    return min(steps, trainer.max_training_steps or steps)


def check_resumption(trainer: TrainerConfig, checkpoints: CheckpointStore, provenance: Provenance) -> list[Change]:
    """Compare a run with the checkpoint that it is to resume, if there is one.

    Returns: what differs and may.

    Raises:
        ConfigError: something differs that makes another experiment, and `trainer.resume_allow_changes` is not set.
    """
    folder = checkpoints.select(trainer)
    if folder is None:
        return []
    origin = Provenance.read(folder)
    if origin is None:
        logger.warning(
            f"{folder} does not tell which settings and data it comes from (an earlier release wrote it): they are not "
            "compared with those of this run"
        )
        return []
    changes = changes_between(origin, provenance)
    check_changes(changes, folder, allowed=trainer.resume_allow_changes)
    return changes


def check_before_start(cfg: SkyRLConfig, dataset: Dataset) -> None:
    """Raise ConfigError if the checkpoint to resume is of another experiment: before anything starts."""
    store = CheckpointStore(cfg.trainer.ckpt_path)
    if store.select(cfg.trainer) is not None:
        check_resumption(cfg.trainer, store, Provenance.of(cfg, dataset))


def finished_message(folder: Path, total_steps: int) -> str:
    """Return what to tell about a run whose checkpoint in `folder` is of the last step or a later one."""
    return (
        f"this run is finished: {folder} is of step {extract_step_from_path(folder)}, and these settings end after "
        f"step {total_steps}. To train on, raise trainer.max_training_steps or trainer.epochs; to train anew, set "
        "trainer.resume_mode=none (which keeps the checkpoints under other names) or another trainer.run_name"
    )


def says_finished(cfg: SkyRLConfig, num_rows: int) -> bool:
    """Return whether a run has nothing left to do, and log so. Reads file names only."""
    folder = CheckpointStore(cfg.trainer.ckpt_path).select(cfg.trainer)
    total = num_training_steps(cfg.trainer, num_rows)
    if folder is None or extract_step_from_path(folder) < total:
        return False
    logger.info(finished_message(folder, total))
    return True
