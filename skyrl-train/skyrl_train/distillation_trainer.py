"""Trainers of on-policy distillation: reinforcement learning steps with teachers that score the tokens.

Sampled tokens get advantages from the teacher's log-probs; the teacher's most likely tokens form the columns
`teacher_ids` and `teacher_log_probs` [B, R, K], which the policy's objective compares with the student's distribution.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import cached_property

import torch

from skyrl_train.algorithms.distillation import compute_teacher_advantages
from skyrl_train.algorithms.reduction import masked_mean
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.distillation import DistillationConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.errors import ConfigError
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.rollouts.types import RolloutBatch
from skyrl_train.teachers import EngineTeacher, Teacher, WorkerTeacher, score_rows
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, RefWorker


class DistillationTrainer(RayPPOTrainer):
    """Run of on-policy distillation (`trainer.distillation`). See `RayPPOTrainer` for the arguments."""

    teacher_clients: Mapping[str, InferenceEngineClient] = {}
    """Engines of the teachers that have some, by name; set before `build_models`."""

    vocab_size = 0
    """Size of the student's output layer; set before `build_models`."""

    num_top = 0
    """Tokens that are compared at each token: `top_k`, the vocabulary, or 0 for the sampled one; set before."""

    @cached_property
    def _teacher_groups(self) -> dict[str, ActorGroup]:
        return {}

    @cached_property
    def _teachers(self) -> dict[str, Teacher]:
        return {}

    @property
    def _distillation(self) -> DistillationConfig:
        return self.cfg.trainer.distillation

    # ---- models

    async def build_models(
        self,
        policy_worker: type[PolicyWorker] = PolicyWorker,
        critic_worker: type[CriticWorker] = CriticWorker,
        ref_worker: type[RefWorker] = RefWorker,
    ) -> None:
        """Start the workers of the run and of teachers without engines, which are placed and moved like the reference
        model. Raises ConfigError if a teacher's engines cannot score."""
        backend = TrainingBackendRegistry.get(self.cfg.trainer.strategy)
        for name, teacher in self._distillation.teachers.items():
            if name not in self.teacher_clients:
                args = (with_reference_model(self.cfg, teacher.model), backend)
                group = self.placement.start_group("ref", ref_worker, args, teacher_folder(self.run_folder, name))
                self._teacher_groups[name] = group
                self._teachers[name] = WorkerTeacher(group, self._forward_schedule)
        await super().build_models(policy_worker, critic_worker, ref_worker)
        temperature = self.cfg.generator.sampling_params.temperature
        for name, client in self.teacher_clients.items():
            teacher = self._teachers[name] = EngineTeacher(client, temperature)
            setting = f"trainer.distillation.teachers.{name}"
            await teacher.check(setting, self.num_top, self.cfg.generator.longest_context)

    @property
    def groups(self) -> list[ActorGroup]:
        return [*super().groups, *self._teacher_groups.values()]

    @property
    def trainable_groups(self) -> list[ActorGroup]:
        teachers = list(self._teacher_groups.values())
        return [group for group in super().trainable_groups if group not in teachers]

    async def shutdown(self) -> None:
        """Stop this run's processes and the teachers' engines, also after a failure."""
        try:
            await super().shutdown()
        finally:
            for client in self.teacher_clients.values():
                await client.teardown()

    # ---- prepare the batch

    def convert_to_training_input(self, rollouts: RolloutBatch) -> TrainingInputBatch:
        """Collate trajectories and record the teacher of each row in the metadata (`teachers`)."""
        batch = super().convert_to_training_input(rollouts)
        batch.metadata["teachers"] = [self._get_teacher(uid) for uid in batch.metadata["uids"]]
        return batch

    def _get_teacher(self, uid: str) -> str:
        """Return the teacher of a prompt, selected by its row's data source."""
        assert self.train_dataset is not None
        number = int(uid.partition("#")[0])  # a prompt that occurs twice in a step has a suffix
        _, _, extras, _ = self.train_dataset[number]
        return teacher_of_source(self._distillation, extras.get("data_source"))

    async def fwd_logprobs_values_reward(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Compute the scores of the run's models, and the teachers' scores as `teacher_log_probs` ([B, R] of sampled
        tokens, or [B, R, K] of the tokens `teacher_ids`)."""
        batch = await super().fwd_logprobs_values_reward(batch)
        with self.timed("teachers"):
            async with self.colocation.swapped_in("ref") if self._teacher_groups else nullcontext():
                names = batch.metadata["teachers"]
                scores = await score_rows(self._teachers, batch, names, self.num_top, self.vocab_size)
        batch["teacher_log_probs"] = scores.log_probs
        if scores.ids is not None:
            batch["teacher_ids"] = scores.ids
        return batch

    def compute_advantages_and_returns(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Compute the advantages of the environments' rewards, combined with the teachers' advantages."""
        batch = super().compute_advantages_and_returns(batch)
        settings = self._distillation
        advantages = batch.tensor("advantages") * settings.reward_coef
        if settings.rewards_tokens:
            mask = batch.tensor("loss_mask")
            own = compute_teacher_advantages(batch.tensor("action_log_probs"), batch.tensor("teacher_log_probs"))
            own = torch.where(mask != 0, own, 0.0)
            advantages = advantages + settings.coef * own
            self.all_metrics["distillation/sampled_kl"] = -masked_mean(own, mask).item()
            del batch["teacher_log_probs"]  # not used later
        batch["advantages"] = advantages
        return batch


class AsyncDistillationTrainer(DistillationTrainer, FullyAsyncRayPPOTrainer):
    """Asynchronous run of on-policy distillation. Teachers score groups in the step that trains them."""


def with_reference_model(cfg: SkyRLConfig, model: str) -> SkyRLConfig:
    """Return settings whose reference model is `model`, for the workers of a teacher."""
    changed = deepcopy(cfg)
    changed.trainer.ref.model.path = model
    return changed


def teacher_folder(run_folder: RunFolder, name: str) -> RunFolder:
    """Return the folder of a teacher's logs, inside the run's log folder."""
    return RunFolder(run_folder.path / "teachers" / name)


def teacher_of_source(settings: DistillationConfig, source: str | None) -> str:
    """Return the name of the teacher of a data source: the teacher that lists it, else the teacher without a list.

    Raises:
        ConfigError: no teacher matches.
    """
    by_source = {own: name for name, teacher in settings.teachers.items() for own in teacher.data_sources or [None]}
    if source in by_source or None in by_source:
        return by_source.get(source) or by_source[None]
    raise ConfigError(
        f"trainer.distillation.teachers: rows of data.train_data have data_source={source!r}, which no teacher lists "
        f"(listed: {', '.join(map(str, by_source))}); add it to a teacher's data_sources, or set data_sources of one "
        "teacher to null, which covers all other rows"
    )
