"""Asynchronous trainer: groups of later steps are generated while the models are updated, with bounded staleness.

`rollouts.schedule` decides which groups start and which are trained, `rollouts.pool` generates them, `rollouts.journal`
preserves finished groups across crashes. The rest of a step is as in the synchronous trainer.
"""

from functools import partial
from typing import Any

from skyrl_train.generators.base import request_rollouts
from skyrl_train.rollouts.adapter import GeneratorOutput, to_rollout_batch
from skyrl_train.rollouts.async_metrics import compute_group_metrics, compute_pool_metrics
from skyrl_train.rollouts.faults import is_sound
from skyrl_train.rollouts.filters import is_informative
from skyrl_train.rollouts.groups import FinishedGroup, make_group_uids_unique, mask_stale
from skyrl_train.rollouts.journal import RolloutJournal
from skyrl_train.rollouts.metrics import concatenate
from skyrl_train.rollouts.pool import RolloutPool
from skyrl_train.rollouts.schedule import ScheduleLimits, ScheduleState
from skyrl_train.rollouts.types import RolloutBatch
from skyrl_train.run_record import describe_sampling
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_batch import TrainingInputBatch

GeneratedOutputGroup = FinishedGroup
"""Name of other SkyRL releases."""


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """Run of asynchronous reinforcement learning (`trainer.fully_async`). See `RayPPOTrainer` for the arguments."""

    pool: RolloutPool | None = None
    """None before the first step."""

    step_groups: list[FinishedGroup]
    """Groups of the step."""

    _schedule_state: ScheduleState | None = None
    """State of the schedule in the checkpoint that the run was resumed from."""

    # ---- the run

    async def train(self) -> None:
        """Run the training loop: take finished groups, compute advantages, update the models, sync weights."""
        await self.start()
        async with self.rollout_pool() as pool:
            self.pool = pool
            for _ in range(self.global_step, self.total_training_steps):
                self.global_step += 1
                with self.timed("step"):
                    with self.timed("wait_for_generation_buffer"):
                        groups = await self.unless_stopped(self.next_groups(pool))
                    with self.timed("convert_to_training_input"):
                        batch = self.convert_generation_group_mini_batch_to_training_input(groups)
                    async with self._write_concurrently(self._build_rollouts(groups)):
                        with self.timed("run_training"):
                            batch = await self.fwd_logprobs_values_reward(batch)
                            batch = self.compute_advantages_and_returns(batch)
                            await self.train_critic(batch)
                            await self.train_policy(batch)
                    pool.record_trained(groups, sync_follows=self.is_sync_due())
                    if self.is_end_of_epoch():
                        await self.update_ref_with_policy()
                    with self.timed("sync_weights"):
                        await self.sync_weights()
                await self.after_step()  # evaluation, metrics, exports, checkpoints: each at its interval

    def rollout_pool(self) -> RolloutPool:
        """Create the pool of groups in the state of the run, including finished groups in the journal of a killed
        run."""
        settings, algorithm = self.cfg.trainer.fully_async, self.cfg.trainer.algorithm
        groups_per_step = self.cfg.trainer.train_batch_size
        limits = ScheduleLimits(
            groups_per_step=groups_per_step,
            max_staleness_steps=settings.max_staleness_steps,
            max_running=settings.get_max_running(groups_per_step),
            groups_per_epoch=len(self.train_dataloader) * groups_per_step,
            total_steps=self.total_training_steps,
            order=settings.order,
            on_stale=settings.on_stale,
        )
        max_batches = algorithm.dynamic_sampling.max_sample_batches
        experiment = self.provenance.sampled() | describe_sampling(self.cfg, self.train_dataset, self.tokenizer)
        journal = RolloutJournal(self.run_folder.journal_path, experiment)
        if self.cfg.trainer.resume_mode == "none":
            journal.discard()
        return RolloutPool(
            self.generate_group,
            limits,
            journal.recover(self._schedule_state or ScheduleState()),
            journal,
            group_timeout_seconds=settings.group_timeout_seconds,
            is_kept=partial(is_informative, tolerance=algorithm.zero_variance_filter_tol)
            if settings.sample_full_batch
            else lambda group: True,
            max_filtered=max_batches * groups_per_step if max_batches > 0 else None,
            timeline=self.timeline,
            on_finished=lambda: self._start_forwards(self.pool) if self.pool is not None else None,
        )

    async def sync_weights(self) -> None:
        """Sync the policy's weights, if a sync is due in this step."""
        if self.pool is not None and not self.is_sync_due():
            return
        if self.pool is not None and self.cfg.pause_at_sync == "wait":
            await self.pool.drain()
        await super().sync_weights()
        if self.pool is not None:
            self.pool.record_synced(self.weight_version)

    def is_sync_due(self) -> bool:
        """Return True every `sync_every_steps` steps, after the last step, and before evaluations and checkpoints:
        these use the weights after this step, and a resumed run starts with a sync."""
        trainer = self.cfg.trainer
        intervals = (trainer.fully_async.sync_every_steps, trainer.eval_interval, trainer.ckpt_interval)
        return any(self.is_due(interval) for interval in intervals)

    # ---- generate

    async def generate_group(self, ticket: int) -> RolloutBatch:
        """Generate the samples of the prompt at position `ticket` of the data, with the seeds of the step that would
        train them in synchronous training."""
        prompt = self.train_dataloader.prompt(ticket)
        step = ticket // self.cfg.trainer.train_batch_size + 1
        inputs = self.generator_input([prompt], step)
        rollouts = self.check_rollouts(await request_rollouts(self.generator, inputs))
        if type(self).postprocess_generator_output is FullyAsyncRayPPOTrainer.postprocess_generator_output:
            return rollouts
        [group] = rollouts.groups
        ids = [trajectory.id for trajectory in group.trajectories]
        output = FinishedGroup(ticket=ticket, group=group, metrics=rollouts.metrics, version=0, seconds=0)
        return to_rollout_batch(self.postprocess_generator_output(output.generator_output, [group.uid] * len(ids)), ids)

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """Change the rewards of a group before it is queued. Override this method for custom rewards."""
        return generator_output

    async def next_groups(self, pool: RolloutPool) -> list[FinishedGroup]:
        """Wait for the groups of this step and record their metrics. Models that may compute meanwhile start their
        forward-only passes over finished groups."""
        self.all_metrics["async/gen_buffer_qsize_at_wait_start"] = float(pool.num_finished)
        self.forwards = self.early_forwards()
        async with self.forwards.running():
            self._start_forwards(pool)
            groups = self.step_groups = await pool.next_batch()
        self._epochs_before = self.train_dataloader.num_epochs_dealt
        self.train_dataloader.skip_batch()
        settings = self.cfg.trainer.fully_async
        keeps_cache = self.cfg.pause_at_sync == "keep" and settings.kv_after_sync != "recompute"
        self.all_metrics |= compute_group_metrics(
            groups, self.global_step - 1, settings.max_staleness_steps, keeps_cache=keeps_cache
        )
        return groups

    def _start_forwards(self, pool: RolloutPool) -> None:
        """Start forward-only passes over finished groups that the step will probably consume."""
        if self.forwards:
            groups = pool.get_predicted_batch()
            self.forwards.offer({place: group for place, group in groups.items() if is_sound(group, limits=None)})

    # ---- prepare the batch

    def convert_generation_group_mini_batch_to_training_input(self, groups: list[FinishedGroup]) -> TrainingInputBatch:
        """Collate the groups of a step into padded tensors, without stale tokens (`on_stale=mask`)."""
        return self.convert_to_training_input(self._build_rollouts(groups))

    def _build_rollouts(self, groups: list[FinishedGroup]) -> RolloutBatch:
        rollouts = concatenate([group.rollouts for group in groups])
        if self.cfg.trainer.fully_async.on_stale == "mask":
            oldest = self.global_step - 1 - self.cfg.trainer.fully_async.max_staleness_steps
            rollouts = RolloutBatch([mask_stale(group, oldest) for group in rollouts.groups], rollouts.metrics)
        return RolloutBatch(make_group_uids_unique(rollouts.groups), rollouts.metrics)

    # ---- metrics, state in checkpoints

    def log(self) -> None:
        """Log the step's metrics, including the pool's."""
        if self.pool is not None:
            self._log_utilisation(self.pool)
        super().log()

    def write_timeline(self) -> None:
        """Record when groups and trainer phases ran in this step."""
        trained = [group.ticket for group in self.step_groups]
        self.run_folder.append_timeline(self.global_step, self.timeline.take(trained))

    def _log_utilisation(self, pool: RolloutPool) -> None:
        """Record the utilisation of trainer and engines."""
        limits, timings = pool.scheduler.limits, self.all_timings
        waited, seconds = timings["wait_for_generation_buffer"], timings["step"]
        counts = pool.take_counts()
        self.all_metrics |= compute_pool_metrics(counts, limits.groups_per_step, limits.max_running, waited, seconds)

    def state(self) -> dict[str, Any]:
        """Return the state of the synchronous trainer and of the schedule."""
        assert self.pool is not None
        return super().state() | {"schedule": self.pool.state().to_json()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "schedule" in state:
            self._schedule_state = ScheduleState.from_json(state["schedule"])
        else:  # a checkpoint of the synchronous trainer
            self._schedule_state = ScheduleState.from_num_steps(state["global_step"], self.cfg.trainer.train_batch_size)

    def checkpoint_completed(self) -> None:
        """Compact the journal after a checkpoint is complete."""
        assert self.pool is not None
        self.pool.compact_journal()
