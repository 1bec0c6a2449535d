"""Synchronous trainer: generate rollouts, compute advantages, update the models, sync weights; repeat.

The trainer moves batches between a generator, the models' workers and the engines. `generators` produce trajectories,
`batch_preparation` converts their rewards to advantages, `algorithms` has the formulas, `training_backends` shard
models.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController
from skyrl_train.algorithms.losses import PolicyLossRegistry, TokenSelectorRegistry
from skyrl_train.batch_preparation import (
    loss_weights,
    mini_batches_of_prompts,
    negative_groups_metric,
    prepare_training_batch,
    rollout_mismatch_metrics,
)
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.dataset.dataloader import PromptDataLoader
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.evaluate import evaluate
from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, request_rollouts
from skyrl_train.generators.inputs import prepare_generator_input
from skyrl_train.generators.sampling import get_sampling_params
from skyrl_train.inference_engines.base import SamplingKeywords
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.memory_plan.decisions import OFFLOAD, decide_memory_of_run
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.batch_calls import forward_recording_routes, train_on_batch
from skyrl_train.orchestration.colocation import Colocation
from skyrl_train.orchestration.early_forwards import EarlyForwards, ForwardPass, lengths_of
from skyrl_train.orchestration.placement import Placement
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.orchestration.skipped_updates import skipped_updates
from skyrl_train.orchestration.step_metrics import first_ratio_metrics, step_metrics
from skyrl_train.orchestration.weight_publisher import WeightPublisher
from skyrl_train.rollouts.arrivals import Arrivals
from skyrl_train.rollouts.collate import collate, compute_kept_token_metrics
from skyrl_train.rollouts.dynamic_sampling import make_uids_unique, sample_batch
from skyrl_train.rollouts.faults import LengthLimits, is_sound, record_faults
from skyrl_train.rollouts.metrics import compute_scores, compute_version_lag_metrics
from skyrl_train.rollouts.timeline import Outcome, Timeline
from skyrl_train.rollouts.trajectory_rows import build_trajectory_rows, iter_token_column_rows, sample_table
from skyrl_train.rollouts.types import RolloutBatch, TrajectoryGroup
from skyrl_train.run_record import WeightRecord, describe_batch
from skyrl_train.step_plan import needs_old_log_probs, step_plan
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.training_run import TrainingRun, num_training_steps
from skyrl_train.types import PromptRow
from skyrl_train.utils.async_blocks import run_thread_during
from skyrl_train.utils.logging_utils import log_example
from skyrl_train.utils.progress import ANSWERS, ConsolePhase, progress
from skyrl_train.utils.storage import location
from skyrl_train.utils.tracking import Tracking
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, RefWorker


class RayPPOTrainer(TrainingRun):
    """Run of reinforcement learning.

    Args:
        cfg: the validated settings.
        tracker: receives the metrics.
        train_dataset, eval_dataset: prompts; `eval_dataset` is optional.
        inference_engine_client: the engines that receive the policy's weights.
        generator: generates trajectories with these engines.
        colocate_pg: on CUDA, the GPUs that workers and engines share.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        tracker: Tracking,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: PromptDataset | None,
        inference_engine_client: InferenceEngineClient,
        generator: GeneratorInterface,
        colocate_pg: Any = None,
        eval_dataset: PromptDataset | None = None,
    ):
        super().__init__(cfg, tracker, tokenizer)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.inference_engine_client = inference_engine_client
        self.generator = generator
        self.placement = Placement(cfg, colocate_pg)
        self.colocation = Colocation(
            inference_engine_client,
            engines_share_device=cfg.trainer.placement.colocate_all,
            policy_and_ref_share=cfg.trainer.placement.colocate_policy_ref,
            start_timeout_seconds=cfg.generator.engine_start_timeout_seconds,
        )
        self.policy_model: ActorGroup
        self.publisher: WeightPublisher
        self.critic_model: ActorGroup | None = None
        self.ref_model: ActorGroup | None = None
        self.forwards = EarlyForwards()
        """Forward-only passes of the step."""
        self._arrivals = Arrivals(cfg.trainer.algorithm.dynamic_sampling.type)
        self.weight_version = 0
        """Version of the engines' weights: the number of training steps before them."""
        self._epochs_before = 0
        self._position: dict[str, int] | None = None
        """Position in the data at the start of this step; None if the step does not read prompts in order."""
        self._sample_names: list[str] = []
        self._weight_record = WeightRecord()
        self._warned_of_negative_groups = False
        self.reward_kl_controller = _reward_kl_controller(cfg)
        self._skipped = {name: skipped_updates(name, cfg) for name in ("policy", "critic")}
        self._build_dataloaders()

    def _build_dataloaders(self) -> None:
        trainer = self.cfg.trainer
        if self.train_dataset is not None:
            self.train_dataloader = PromptDataLoader(
                self.train_dataset, trainer.train_batch_size, shuffle=True, drop_last=True, seed=trainer.seed
            )
            self.total_training_steps = num_training_steps(trainer, len(self.train_dataset))
        self.eval_dataloader = None
        if self.eval_dataset is not None:
            self.eval_dataloader = PromptDataLoader(
                self.eval_dataset, trainer.eval_batch_size, shuffle=False, drop_last=False, seed=trainer.seed
            )

    # ---- the run

    async def train(self) -> None:
        """Run the training loop: generate rollouts, compute advantages, update the models, sync weights."""
        await self.start()
        for prompts in self.batches():
            self.global_step += 1
            with self.timed("step"):
                with self.timed("generate"):
                    rollouts = await self.unless_stopped(self.generate(prompts))
                batch = self.convert_to_training_input(rollouts)
                with self.timed("fwd_logprobs_values_reward"):
                    batch = await self.fwd_logprobs_values_reward(batch)
                with self.timed("compute_advantages_and_returns"):
                    batch = self.compute_advantages_and_returns(batch)
                with self.timed("train_critic_and_policy"):
                    await self.train_critic(batch)
                    await self.train_policy(batch)
                if self.is_end_of_epoch():
                    await self.update_ref_with_policy()
                with self.timed("sync_weights"):
                    await self.sync_weights()
            await self.after_step()  # evaluation, metrics, exports, checkpoints: each at its interval

    async def start(self) -> None:
        """Log the step plan, resume from a checkpoint if there is one, sync the engines, evaluate before training."""
        self.tracker.total_steps = self.total_training_steps
        num_prompts = None if self.train_dataset is None else len(self.train_dataset)
        plan = step_plan(self.cfg, num_prompts=num_prompts)
        logger.info("step plan\n{}", plan)
        await self.start_hooks()
        await self.load_checkpoint()
        with self.timed("sync_weights"):
            await self.sync_weights()
        self.write_fingerprints()
        if self.global_step == 0 and self.cfg.trainer.eval_before_train and self.eval_dataloader is not None:
            await self.evaluate()
            self.log()
        self.all_metrics, self.all_timings = {}, {}

    def batches(self) -> Iterator[list[PromptRow]]:
        """Yield the prompts of each remaining step, epoch after epoch. (Dynamic sampling may take more.)"""
        for _ in range(self.global_step, self.total_training_steps):
            self._epochs_before = self.train_dataloader.num_epochs_dealt
            self._position = self.train_dataloader.state_dict()
            yield self.train_dataloader.next_batch()

    def rewind_step(self) -> None:
        """Return to the end of the previous step; its prompts are next again."""
        super().rewind_step()
        if self._position is not None:
            self.train_dataloader.load_state_dict(self._position)

    def is_end_of_epoch(self) -> bool:
        """Return True if the reference model is due for an update: this step used the last prompts of an epoch and is
        not the last of the run."""
        return (
            self.cfg.trainer.update_ref_every_epoch
            and self.global_step < self.total_training_steps
            and self.train_dataloader.num_epochs_dealt > self._epochs_before
        )

    def log(self) -> None:
        """Log the step's metrics with the current epoch."""
        if self.global_step and self.train_dataset is not None:
            self.all_metrics |= {
                "trainer/epoch": self.train_dataloader.epoch,
                "trainer/global_step": self.global_step,
            }
        if self.global_step:
            self.write_timeline()
        self.all_metrics |= self.colocation.take_metrics()
        super().log()

    @cached_property
    def timeline(self) -> Timeline:
        """Recorder of concurrent activities for the dashboard."""
        return Timeline()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the duration of a block as `timing/<name>` and on the timeline."""
        with super().timed(name), self.timeline.phase(name):
            yield

    def write_timeline(self) -> None:
        """Write the timeline of this step."""
        record = self.timeline.take(self._sample_names, "sample")
        if self.cfg.trainer.dump_trajectories:
            self.run_folder.append_timeline(self.global_step, record)

    # ---- models

    async def build_models(
        self,
        policy_worker: type[PolicyWorker] = PolicyWorker,
        critic_worker: type[CriticWorker] = CriticWorker,
        ref_worker: type[RefWorker] = RefWorker,
    ) -> None:
        """Start the workers. Policy loss and training backend are looked up here and sent to the workers."""
        decision = decide_memory_of_run(self.cfg)
        if decision.reasons:
            logger.info("{}", decision)
        cfg = decision.apply(self.cfg)
        self.colocation.offload = decision.settings.get(OFFLOAD, cfg.trainer.placement.offload)
        trainer, loss = cfg.trainer, cfg.trainer.algorithm.policy_loss_type
        selector = TokenSelectorRegistry.get(loss) if loss in TokenSelectorRegistry else None
        backend = TrainingBackendRegistry.get(trainer.strategy)
        updates = self._count_total_updates(trainer.policy_mini_batch_size)
        args = (cfg, PolicyLossRegistry.get(loss), updates, selector, backend)
        self.policy_model = self.placement.start_group("policy", policy_worker, args, self.run_folder)
        if trainer.critic.model.path is not None:
            args = (cfg, self._count_total_updates(trainer.critic_mini_batch_size), backend)
            self.critic_model = self.placement.start_group("critic", critic_worker, args, self.run_folder)
        if trainer.algorithm.uses_reference_model:
            self.ref_model = self.placement.start_group("ref", ref_worker, (cfg, backend), self.run_folder)
        await self.placement.check_files([*self.cfg.data.train_data, *self.cfg.data.val_data], self.run_folder)
        with progress.phase("load the models"):
            await self.colocation.start(self.groups)
        self.publisher = WeightPublisher(
            self.cfg, self.policy_model, self.inference_engine_client, self.colocation, self.tokenizer
        )

    @property
    def groups(self) -> list[ActorGroup]:
        """Models of the run, policy first."""
        return [group for group in (self.policy_model, self.critic_model, self.ref_model) if group is not None]

    async def sync_weights(self) -> None:
        """Sync and verify the policy's weights in all engines, with this step's number as version."""
        self.weight_version = self.global_step
        metrics = await self.publisher.publish(self.weight_version)
        self.all_metrics |= {f"weight_sync/{name}": value for name, value in metrics.items()}
        if self.cfg.trainer.dump_trajectories and self.publisher.fingerprints:
            self.fingerprints["weights"] = self._weight_record.record(self.publisher.fingerprints)

    async def update_ref_with_policy(self) -> None:
        """Replace the reference model by the current policy (`update_ref_every_epoch`)."""
        with self.timed("update_ref_with_policy"):
            await self.policy_model.call_all(PolicyWorker.save_hf_model, str(self._reference_folder), self.tokenizer)
            await self._load_reference()

    async def _load_reference(self) -> None:
        assert self.ref_model is not None
        async with self.colocation.swapped_in("ref"):
            await self.ref_model.call_all(RefWorker.load_weights, str(self._reference_folder))

    @property
    def _reference_folder(self) -> Path:
        """Folder of the reference model after its first update."""
        return self.run_folder.path / "reference"

    async def shutdown(self) -> None:
        """Flush the trackers and stop the processes of this run, also after a failure."""
        await self.saver.close()
        self.tracker.finish()
        await asyncio.gather(*(group.shutdown() for group in self.groups), self.inference_engine_client.teardown())

    # ---- generate

    async def generate(self, prompts: list[PromptRow]) -> RolloutBatch:
        """Generate `n_samples_per_prompt` trajectories for each prompt (or, with dynamic sampling, for other prompts).
        Models that may compute meanwhile start their forward-only passes over finished groups, unless a subclass
        overrides `check_rollouts`."""
        # A custom filter may truncate or change tokens: nothing is computed before it.
        has_own_filter = type(self).check_rollouts is not RayPPOTrainer.check_rollouts
        self.forwards = EarlyForwards() if has_own_filter else self.early_forwards()
        self._arrivals = Arrivals(self.cfg.trainer.algorithm.dynamic_sampling.type)
        num_answers = len(prompts) * self.cfg.generator.n_samples_per_prompt
        with progress.phase("generate", num_answers, ANSWERS) as phase:
            async with self.forwards.running():
                if self.cfg.trainer.algorithm.dynamic_sampling.type is None:
                    rollouts = self.check_rollouts(await self.request_rollouts(prompts))
                else:
                    rollouts = await self._generate_informative(prompts, phase)
        async with self._write_concurrently(rollouts):
            await self.colocation.after_generating()
        self._sample_names = self.timeline.record_samples(_iter_spans(rollouts, self.global_step, self.weight_version))
        return rollouts

    async def _generate_informative(self, prompts: list[PromptRow], phase: ConsolePhase) -> RolloutBatch:
        """Generate a full batch with dynamic sampling, which may use further prompts."""
        seen: set[str] = set()

        async def request(num_batches_before: int) -> RolloutBatch:
            rows = prompts if num_batches_before == 0 else self.train_dataloader.next_batch()
            if num_batches_before > 0:
                phase.extend(len(rows) * self.cfg.generator.n_samples_per_prompt)
            return self.check_rollouts(await self.request_rollouts(make_uids_unique(rows, seen)))

        settings = self.cfg.trainer.algorithm.dynamic_sampling
        return await sample_batch(request, settings, len(prompts), self.step_generator("dynamic_sampling"))

    def request_rollouts(self, prompts: list[PromptRow]) -> Awaitable[RolloutBatch]:
        """Request the generator's trajectories for these prompts."""
        self.colocation.check("generate")
        generator_input = self.generator_input(prompts)
        if self.forwards:
            self._arrivals.request([row["uid"] for row in prompts])
            generator_input["on_group"] = self._handle_finished_group
        return request_rollouts(self.generator, generator_input)

    def _handle_finished_group(self, group: TrajectoryGroup) -> None:
        """Start forward-only passes over a finished group. A group with a failed trajectory waits, since it may be
        truncated or left out."""
        generator = self.cfg.generator
        if is_sound(group, LengthLimits.of(generator, generator.sampling_params)):
            self._arrivals.add(group)
            self.forwards.offer(self._arrivals.compute_positions(self.cfg.trainer.train_batch_size))

    def check_rollouts(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Record generator faults on the trajectories. Override this method for custom filters: it runs before dynamic
        sampling and metrics, and in overriding subclasses before any forward pass."""
        generator = self.cfg.generator
        return record_faults(rollouts, LengthLimits.of(generator, generator.sampling_params))

    def generator_input(self, prompts: list[PromptRow], step: int | None = None) -> GeneratorInput:
        """Build the generator input for these prompts.

        Args:
            step: step that trains on the samples, whose number seeds them, so that a resumed run samples the same;
                None: the current step.
        """
        generator = self.cfg.generator
        step = self.global_step if step is None else step
        generator_input, _ = prepare_generator_input(
            prompts,
            generator.n_samples_per_prompt,
            self._get_sampling_keywords(),
            self.cfg.environment.env_class,
            "train",
            step,
            sampling_seed=step,
            weight_version=self.weight_version,
        )
        return generator_input

    def _get_sampling_keywords(self) -> SamplingKeywords:
        """Return the engines' sampling keywords for training rollouts."""
        params = get_sampling_params(self.cfg.generator.sampling_params)
        return params | {"return_kept_tokens": True} if self.cfg.trainer.policy.sampling_mask_replay else params

    def _write_concurrently(self, rollouts: RolloutBatch) -> AbstractAsyncContextManager[None]:
        """Record metrics of rollouts, and write the rollouts in a thread concurrently with the block."""
        self._record_metrics(rollouts)
        return run_thread_during(partial(self._write, rollouts), f"writing the trajectories of step {self.global_step}")

    def _record_metrics(self, rollouts: RolloutBatch) -> None:
        n = self.cfg.generator.n_samples_per_prompt
        rewards = compute_scores(rollouts.groups)
        self.all_metrics |= rollouts.metrics | compute_version_lag_metrics(rollouts.trajectories, self.global_step - 1)
        self.all_metrics |= self.inference_engine_client.take_metrics()
        self.all_metrics |= {
            f"reward/avg_pass_at_{n}": rewards["pass_at_n"],
            "reward/avg_raw_reward": rewards["avg_score"],
            "reward/mean_positive_reward": rewards["mean_positive_reward"],
        }

    def _write(self, rollouts: RolloutBatch) -> None:
        """Write trajectories to disk, send the first to the tracker, and log an example every `print_example_interval`
        steps."""
        if self.cfg.trainer.dump_trajectories:
            rows = build_trajectory_rows(rollouts.groups, self.tokenizer)
            self.run_folder.write_trajectories(self.global_step, "train", rows)
            if (limit := self.cfg.trainer.max_trajectories_gb) is not None:
                self.run_folder.delete_oldest_trajectories(int(limit * 1e9))
        if (num := self.cfg.trainer.num_logger_train_samples) > 0:
            samples = sample_table(rollouts.trajectories[:num], self.tokenizer)
            self.tracker.log_samples("trajectories/train", samples, self.global_step)
        interval = self.cfg.trainer.print_example_interval
        if interval > 0 and (self.global_step - 1) % interval == 0:
            _, _, sample = next(rollouts.rows())
            prompt, response = (self.tokenizer.decode(ids) for ids in (sample.prompt_ids, sample.response_ids))
            log_example(logger, prompt, response, sample.rewards)

    # ---- prepare the batch

    def convert_to_training_input(self, rollouts: RolloutBatch) -> TrainingInputBatch:
        """Collate trajectories into padded tensors (see `collate`)."""
        batch = self._collate(rollouts)
        self.all_metrics |= compute_kept_token_metrics(batch)
        return batch

    def _collate(self, rollouts: RolloutBatch) -> TrainingInputBatch:
        policy = self.cfg.trainer.policy
        return collate(
            rollouts,
            self.tokenizer,
            self.global_step,
            with_routes=policy.routing_replay == "R3",
            with_kept_tokens=policy.sampling_mask_replay,
        )

    def early_forwards(self) -> EarlyForwards:
        """Return the forward-only passes of the next step that may start while its groups are generated. Their weights
        change only at the end of a step."""
        trainer, generator = self.cfg.trainer, self.cfg.generator
        by_number = trainer.max_tokens_per_microbatch is None and not generator.step_wise_trajectories
        groups = [self.ref_model, self.critic_model]
        if needs_old_log_probs(self.cfg) and trainer.policy.routing_replay != "R2":  # R2 also records routes
            groups.append(self.policy_model)
        return EarlyForwards(
            [
                ForwardPass(
                    group,
                    self._forward_schedule,
                    self._collate,
                    num_prompts=trainer.train_batch_size,
                    prompts_each=trainer.policy_mini_batch_size,
                    rows_each=generator.n_samples_per_prompt if by_number and generator.uses_environments else None,
                )
                for group in groups
                if group is not None and self._can_compute_early(group)
            ]
        )

    def _can_compute_early(self, group: ActorGroup) -> bool:
        """Return True if the workers of a model may compute while engines generate. On CPU, models are never
        offloaded."""
        on_cpu = self.cfg.trainer.placement.resolve_device() == "cpu"
        return on_cpu or self.colocation.stays_beside_engines(group.name)

    async def fwd_logprobs_values_reward(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Compute `base_action_log_probs` (reference model), `values` (critic) and `action_log_probs` (policy before
        this step's updates). With a single update per step, and no earlier use, `action_log_probs` come from the
        training forward."""
        if self.ref_model is not None:
            async with self.colocation.swapped_in("ref"):
                batch["base_action_log_probs"] = await self._forward(self.ref_model, batch)
        if self.critic_model is not None:
            async with self.colocation.swapped_in("critic"):
                batch["values"] = await self._forward(self.critic_model, batch)
        if needs_old_log_probs(self.cfg) and self.cfg.trainer.policy.routing_replay == "R2":
            schedule = self._forward_schedule(self.policy_model, batch)
            outputs = await forward_recording_routes(self.policy_model, schedule, batch)
            batch["action_log_probs"], batch["expert_routes"] = outputs
        elif needs_old_log_probs(self.cfg):
            batch["action_log_probs"] = await self._forward(self.policy_model, batch)
        self.all_metrics |= self.forwards.metrics()
        self.forwards = EarlyForwards()
        return batch

    async def _forward(self, group: ActorGroup, batch: TrainingInputBatch) -> torch.Tensor:
        """Run a forward-only pass, or the rest of one that started while groups were generated."""
        return await self.forwards.finish(group, self._forward_schedule(group, batch), batch)

    def _forward_schedule(self, group: ActorGroup, batch: TrainingInputBatch) -> Schedule:
        """Divide a forward-only pass. The policy uses its training micro-batches, so that its first ratios are exactly
        1."""
        trainer = self.cfg.trainer
        micro = trainer.micro_forward_batch_size_per_gpu
        if group is self.policy_model:
            micro = trainer.micro_train_batch_size_per_gpu
        return self._schedule(group, batch, trainer.policy_mini_batch_size, micro)

    def _schedule(self, group: ActorGroup, batch: TrainingInputBatch, prompts: int, micro_batch_size: int) -> Schedule:
        """Divide `batch` into mini-batches of `prompts` prompts, and mini-batches over the group's ranks."""
        max_tokens = group.token_budget(self.cfg.trainer.max_tokens_per_microbatch)
        return Schedule.of(
            lengths_of(batch),
            mini_batches_of_prompts(batch.metadata["uids"], prompts),
            group.data_parallel_size,
            micro_batch_size=micro_batch_size,
            max_tokens=max_tokens,
            prefixes=None if max_tokens is None else group.prefix_order(batch),
        )

    def _count_updates(self, mini_batch_size: int) -> int:
        """Return the number of optimizer steps of a training step."""
        return self.cfg.trainer.train_batch_size // mini_batch_size * self.cfg.trainer.update_epochs_per_batch

    def _count_total_updates(self, mini_batch_size: int) -> int:
        return max(1, self.total_training_steps * self._count_updates(mini_batch_size))

    def compute_advantages_and_returns(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Compute advantages (`prepare_training_batch`) and update the KL controller by the step's divergence."""
        batch, metrics = prepare_training_batch(batch, self.cfg, self.reward_kl_controller.value)
        if "loss/avg_kl" in metrics:
            self.reward_kl_controller.update(metrics["loss/avg_kl"], n_steps=sum(batch.metadata["valid"]))
        metric = negative_groups_metric(self.cfg.trainer.algorithm)
        if metrics.get(metric) and not self._warned_of_negative_groups:
            self._warned_of_negative_groups = True
            estimator = self.cfg.trainer.algorithm.advantage_estimator
            logger.warning(
                f"trainer.algorithm.advantage_estimator={estimator} is not defined for prompts with a negative mean "
                f"reward: their advantages are 0 (see {metric}). Use non-negative rewards"
            )
        self.all_metrics |= metrics
        return batch

    # ---- update the models

    async def train_critic(self, batch: TrainingInputBatch) -> None:
        """Take the critic's optimizer steps, if there is a critic."""
        if self.critic_model is None:
            return
        trainer = self.cfg.trainer
        mini_batches = mini_batches_of_prompts(batch.metadata["uids"], trainer.critic_mini_batch_size)
        batch["critic_loss_weights"] = loss_weights(batch, mini_batches, "token_mean")
        schedule = self._schedule(
            self.critic_model, batch, trainer.critic_mini_batch_size, trainer.micro_train_batch_size_per_gpu
        )
        with self.timed("critic_train"):
            async with self.colocation.swapped_in("critic"):
                update = await train_on_batch(self.critic_model, schedule, batch, trainer.update_epochs_per_batch)
        self.all_metrics |= step_metrics("critic", update.losses, update.steps)
        self.all_metrics |= self._skipped["critic"].count(update, batch, is_last_step=self.is_last_step())

    async def train_policy(self, batch: TrainingInputBatch) -> None:
        """Take the policy's optimizer steps: one per mini-batch, for `update_epochs_per_batch` epochs."""
        trainer, algorithm = self.cfg.trainer, self.cfg.trainer.algorithm
        mini_batches = mini_batches_of_prompts(batch.metadata["uids"], trainer.policy_mini_batch_size)
        batch["loss_weights"] = loss_weights(batch, mini_batches, algorithm.loss_reduction, algorithm.max_seq_len)
        if algorithm.policy_loss_type in TokenSelectorRegistry:
            noise = self.step_generator("token_noise")
            batch["token_noise"] = torch.rand(batch.tensor("loss_mask").shape, generator=noise)
        if trainer.dump_data_batch:
            folder = location(trainer.export_path) / "dumped_data"
            batch.save(folder / f"global_step_{self.global_step}_training_input.pkl")
        schedule = self._schedule(
            self.policy_model, batch, trainer.policy_mini_batch_size, trainer.micro_train_batch_size_per_gpu
        )
        with self.timed("policy_train"):
            epochs, records_tokens = trainer.update_epochs_per_batch, trainer.records_token_columns
            update = await train_on_batch(self.policy_model, schedule, batch, epochs, with_entropies=records_tokens)
        if update.old_log_probs is not None:
            batch["action_log_probs"] = update.old_log_probs
            self.all_metrics |= rollout_mismatch_metrics(batch, algorithm.max_rollout_gap)
        if records_tokens:
            batch["entropies"] = update.entropies
            self.run_folder.write_token_columns(self.global_step, iter_token_column_rows(batch))
        if trainer.dump_trajectories:
            self.fingerprints["batch"] = describe_batch(batch)
        self.all_metrics |= step_metrics("policy", update.losses, update.steps)
        self.all_metrics |= self._skipped["policy"].count(update, batch, is_last_step=self.is_last_step())
        tolerance = algorithm.first_ratio_tolerance or (0.2 if trainer.bf16 else 1e-4)
        self.all_metrics |= first_ratio_metrics(update.losses[0], tolerance)
        self.all_metrics["policy/response_length"] = (
            batch.tensor("response_mask").sum(dim=-1).mean(dtype=torch.float).item()
        )

    def step_generator(self, purpose: str) -> torch.Generator:
        """Return the random generator of this step for one purpose, equal in a resumed run."""
        digest = hashlib.sha256(f"{self.cfg.trainer.seed}/{self.global_step}/{purpose}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    # ---- evaluation, state in checkpoints

    async def evaluate(self) -> None:
        """Evaluate the current policy on the evaluation set, if there is one."""
        if self.eval_dataloader is None:
            return
        with self.timed("eval"):
            self.all_metrics |= await evaluate(
                self.eval_dataloader, self.generator, self.cfg, self.global_step, self.tokenizer, self.tracker
            )

    @property
    def trainable_groups(self) -> list[ActorGroup]:
        return [group for group in self.groups if group is not self.ref_model]

    def state(self) -> dict[str, Any]:
        """Return the position in the data, the KL controller's coefficient, and the counts of skipped updates."""
        return {
            "dataloader": self.train_dataloader.state_dict(),
            "reward_kl_coef": self.reward_kl_controller.value,
            "skipped_updates": {name: counter.state() for name, counter in self._skipped.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if "schedule" in state and not self.cfg.trainer.fully_async.enabled:
            logger.warning(
                "the checkpoint is from asynchronous training: groups that were finished but not trained are "
                "generated again, and prompts that were trained out of order are repeated or skipped in this epoch"
            )
        self.train_dataloader.load_state_dict(state["dataloader"])
        self.reward_kl_controller.value = state["reward_kl_coef"]
        for name, counts in state.get("skipped_updates", {}).items():  # absent in checkpoints of earlier releases
            self._skipped[name].load_state(counts)

    async def save_more(self, folder: Path) -> None:
        """Save the reference model, if it has been updated."""
        if self.cfg.trainer.update_ref_every_epoch and self._reference_folder.exists():
            shutil.copytree(self._reference_folder, folder / "ref")

    async def load_more(self, folder: Path | None) -> None:
        shutil.rmtree(self._reference_folder, ignore_errors=True)
        if folder is not None and (folder / "ref").exists() and self.ref_model is not None:
            shutil.copytree(folder / "ref", self._reference_folder)
            await self._load_reference()


def _iter_spans(rollouts: RolloutBatch, step: int, version: int) -> Iterator[tuple[str, float, float, int, Outcome]]:
    """Yield name, start, end, weight version and outcome of a step's trajectories with known times."""
    for group in rollouts.groups:
        for each in group.trajectories:
            if each.span is not None:
                outcome: Outcome = "finished" if each.failure is None else "failed"
                yield f"{step}:{group.uid}_{each.id.repetition_id}", *each.span, version, outcome


def _reward_kl_controller(cfg: SkyRLConfig) -> FixedKLController | AdaptiveKLController:
    algorithm = cfg.trainer.algorithm
    if algorithm.kl_ctrl.type == "adaptive":
        return AdaptiveKLController(algorithm.kl_loss_coef, algorithm.kl_ctrl.kl_target, algorithm.kl_ctrl.horizon)
    return FixedKLController(algorithm.kl_loss_coef)
