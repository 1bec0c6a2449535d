"""Supervised trainer for demonstrations and preference pairs, with the workers, loss interface, checkpoints and metrics
of reinforcement learning."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.losses.preference import DPOConfig
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.dataset.dataloader import PromptDataLoader
from skyrl_train.dataset.supervised import Item, SupervisedDataset
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.batch_calls import forward, train_on_batch
from skyrl_train.orchestration.colocation import Colocation
from skyrl_train.orchestration.placement import Placement
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.orchestration.skipped_updates import skipped_updates
from skyrl_train.orchestration.step_metrics import step_metrics
from skyrl_train.rollouts.padding import convert_prompts_responses_to_batch_tensors
from skyrl_train.run_record import describe_batch, row_fingerprints
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.training_run import TrainingRun, num_training_steps
from skyrl_train.utils.progress import progress
from skyrl_train.utils.tracking import Tracking
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import RefWorker

_NAMES = {"train/final_loss": "train/loss", "train/policy_lr": "train/lr", "train/policy_entropy": "train/entropy"}


class SupervisedTrainer(TrainingRun):
    """Run of supervised training. A batch is one optimizer step.

    Args:
        cfg: the settings in the workers' format (`SupervisedConfig.to_training_config`); `policy_loss_type` is
            `cross_entropy` for demonstrations, `dpo` for pairs.
        train_dataset, eval_dataset: examples, or pairs.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        tracker: Tracking,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: SupervisedDataset,
        eval_dataset: SupervisedDataset | None = None,
    ):
        trainer = cfg.trainer
        super().__init__(cfg, tracker, tokenizer)
        self.with_pairs = PolicyLossRegistry.get_requirements(trainer.algorithm.policy_loss_type).pairs
        self.dataloader = PromptDataLoader(
            train_dataset, trainer.train_batch_size, shuffle=True, drop_last=True, seed=trainer.seed
        )
        self.train_dataset = train_dataset
        self._data_sources = train_dataset.sources
        self.total_training_steps = num_training_steps(trainer, len(train_dataset))
        self.eval_dataset = eval_dataset
        self.placement = Placement(cfg, None)
        self.colocation = Colocation(
            None,
            engines_share_device=cfg.trainer.placement.colocate_all,
            policy_and_ref_share=cfg.trainer.placement.colocate_policy_ref,
            offload="all" if cfg.trainer.placement.offload == "auto" else cfg.trainer.placement.offload,
        )
        self._skipped = skipped_updates("policy", cfg, section="train")
        self.policy_model: ActorGroup
        self.ref_model: ActorGroup | None = None

    # ---- the run

    async def train(self) -> None:
        """Run the training loop: read a batch, add the reference model's log-probs, update the policy."""
        await self.start()
        for items in self.batches():
            self.global_step += 1
            with self.timed("step"):
                batch = self.to_batch(items)
                if self.ref_model is not None:
                    with self.timed("reference"):
                        batch = await self.add_reference_log_probs(batch)
                with self.timed("learn"):
                    await self.train_on_batch(batch)
            await self.after_step()

    async def start(self) -> None:
        """Resume from a checkpoint if there is one, and evaluate before training."""
        self.tracker.total_steps = self.total_training_steps
        await self.start_hooks()
        await self.load_checkpoint()
        if self.global_step == 0 and self.cfg.trainer.eval_before_train and self.eval_dataset is not None:
            await self.evaluate()
            self.log()
        self.all_metrics, self.all_timings = {}, {}

    def batches(self) -> Iterator[list[Item]]:
        """Yield the examples of each remaining step, epoch after epoch."""
        for _ in range(self.global_step, self.total_training_steps):
            yield self.dataloader.next_batch()

    def log(self) -> None:
        self.all_metrics |= {"trainer/epoch": self.dataloader.epoch, "trainer/global_step": self.global_step}
        self.all_metrics |= self.colocation.take_metrics()
        super().log()

    # ---- models

    async def build_models(self) -> None:
        """Start the workers."""
        loss_fn = PolicyLossRegistry.get(self.cfg.trainer.algorithm.policy_loss_type)
        backend = TrainingBackendRegistry.get(self.cfg.trainer.strategy)
        args = (self.cfg, loss_fn, max(1, self.total_training_steps), None, backend)
        self.policy_model = self.placement.start_group("policy", PolicyWorker, args, self.run_folder)
        groups = [self.policy_model]
        if self.with_pairs:
            self.ref_model = self.placement.start_group("ref", RefWorker, (self.cfg, backend), self.run_folder)
            groups.append(self.ref_model)
        await self.placement.check_files(self._data_sources, self.run_folder)
        with progress.phase("load the models"):
            await self.colocation.start(groups)

    async def shutdown(self) -> None:
        """Flush the trackers and stop the processes of this run, also after a failure."""
        await self.saver.close()
        self.tracker.finish()
        groups = [group for group in (self.policy_model, self.ref_model) if group is not None]
        await asyncio.gather(*(group.shutdown() for group in groups))

    # ---- data

    def to_batch(self, items: Sequence[Item]) -> TrainingInputBatch:
        """Collate examples into tensors: the first token is the prompt, the others are the response. The rows of a pair
        are consecutive: 2k (preferred) and 2k + 1."""
        algorithm = self.cfg.trainer.algorithm
        examples = [example for item in items for example in item]
        no_rewards = [[0.0] * (len(example.ids) - 1) for example in examples]
        sequences, attention_mask, response_mask, advantages, loss_mask, _ = convert_prompts_responses_to_batch_tensors(
            self.tokenizer,
            [example.ids[:1] for example in examples],
            [example.ids[1:] for example in examples],
            no_rewards,
            [example.mask[1:] for example in examples],
        )
        return TrainingInputBatch(
            sequences=sequences,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            loss_weights=token_weights(loss_mask, algorithm.loss_reduction, algorithm.max_seq_len),
            advantages=advantages,
            metadata={"response_length": response_mask.shape[1]},
        )

    def schedule(self, batch: TrainingInputBatch, group: ActorGroup) -> Schedule:
        trainer = self.cfg.trainer
        return Schedule.of(
            batch.tensor("attention_mask").sum(dim=1).tolist(),
            [range(len(batch))],
            group.data_parallel_size,
            micro_batch_size=trainer.micro_train_batch_size_per_gpu,
            max_tokens=group.token_budget(self.cfg.trainer.max_tokens_per_microbatch),
            unit=2 if self.with_pairs else 1,
        )

    async def add_reference_log_probs(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Add the reference model's log-probs under the name used by the `dpo` loss."""
        assert self.ref_model is not None
        async with self.colocation.swapped_in("ref"):
            batch["action_log_probs"] = await forward(self.ref_model, self.schedule(batch, self.ref_model), batch)
        return batch

    # ---- update, evaluate

    async def train_on_batch(self, batch: TrainingInputBatch) -> None:
        """Take one optimizer step on the whole batch."""
        schedule = self.schedule(batch, self.policy_model)
        update = await train_on_batch(self.policy_model, schedule, batch, epochs=1)
        metrics = step_metrics("train", update.losses, update.steps)
        for name in ("train/policy_loss", "train/ratio_deviation_max"):  # a duplicate of the loss; always 0 here
            del metrics[name]
        self.all_metrics |= {_NAMES.get(name, name): value for name, value in metrics.items()}
        self.all_metrics |= self._skipped.count(update, batch, is_last_step=self.is_last_step())
        if self.cfg.trainer.dump_trajectories:
            self.fingerprints["batch"] = described = describe_batch(batch, mask="loss_mask")
            described["hashes"]["sequences"] = row_fingerprints(batch.tensor("sequences"))
        self.all_metrics["train/tokens"] = float(batch.tensor("attention_mask").sum())
        self.all_metrics["train/learnt_tokens"] = float(batch.tensor("loss_mask").sum())

    async def evaluate(self) -> None:
        """Compute the loss on the evaluation set. Demonstrations: the mean over tokens of the loss mask, and its
        exponential. Pairs: the mean over pairs, and the fraction of pairs whose preferred response gained more over the
        reference model than the other."""
        if self.eval_dataset is None:
            return
        size = self.cfg.trainer.eval_batch_size
        dataset = self.eval_dataset
        totals: dict[str, float] = {}
        with self.timed("eval"):
            for start in range(0, len(dataset), size):
                items = [dataset[index] for index in range(start, min(len(dataset), start + size))]
                for name, value in (await self._evaluate_batch(self.to_batch(items))).items():
                    totals[name] = totals.get(name, 0.0) + value
        count = max(1.0, totals.pop("count"))
        means = {f"eval/{name}": value / count for name, value in totals.items()}
        if not self.with_pairs:
            means["eval/perplexity"] = math.exp(min(means["eval/loss"], 100.0))
        self.all_metrics |= means

    async def _evaluate_batch(self, batch: TrainingInputBatch) -> dict[str, float]:
        """Compute sums over a batch of the evaluation set, and the `count` to divide by."""
        mask = batch.tensor("loss_mask")
        log_probs = await forward(self.policy_model, self.schedule(batch, self.policy_model), batch)
        if not self.with_pairs:
            return {"loss": -torch.where(mask > 0, log_probs, 0.0).sum().item(), "count": mask.sum().item()}
        batch = await self.add_reference_log_probs(batch)
        gains = torch.where(mask > 0, log_probs - batch.tensor("action_log_probs"), 0.0).sum(dim=1)
        margins = self.cfg.trainer.algorithm.section(DPOConfig).beta * (gains[0::2] - gains[1::2])
        return {
            "loss": torch.nn.functional.softplus(-margins).sum().item(),
            "accuracy": (margins > 0).sum().item(),
            "margin": margins.sum().item(),
            "count": float(len(margins)),
        }

    # ---- state in checkpoints

    @property
    def trainable_groups(self) -> list[ActorGroup]:
        return [self.policy_model]

    def state(self) -> dict[str, Any]:
        return {"dataloader": self.dataloader.state_dict(), "skipped_updates": self._skipped.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.dataloader.load_state_dict(state["dataloader"])
        if "skipped_updates" in state:  # absent in checkpoints of earlier releases
            self._skipped.load_state(state["skipped_updates"])
