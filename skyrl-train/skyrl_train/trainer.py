"""The synchronous trainer: answer, judge, learn; repeat.

It moves batches between a generator, the policy's workers and the engines. What is computed is in `algorithms`, how a
trajectory comes about in `generators`, how the model is sharded in `workers`.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry, normalize_advantages
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.reduction import masked_mean, token_weights
from skyrl_train.checkpoints import CheckpointStore, extract_step_from_path
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.dataloader import PromptDataLoader
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl_train.errors import SkyRLError
from skyrl_train.evaluate import evaluate
from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.generators.trajectory_rows import trajectory_rows
from skyrl_train.generators.utils import (
    get_metrics_from_generator_output,
    get_sampling_params,
    prepare_generator_input,
    validate_generator_output,
)
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.io import expand_path, write_atomically
from skyrl_train.utils.logging_utils import log_example
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.timer import Timer
from skyrl_train.utils.tracking import Tracking
from skyrl_train.workers.actor_group import ActorGroup, gather_rows, rows_of_ranks
from skyrl_train.workers.model_worker import RefWorker
from skyrl_train.workers.placement import Placement
from skyrl_train.workers.policy_worker import MetricSums, PolicyWorker


class RayPPOTrainer:
    """One run of reinforcement learning.

    Args:
        cfg: the validated settings.
        tracker: where metrics go.
        train_dataset, eval_dataset: prompts; no evaluation without the latter.
        inference_engine_client: the engines that get the policy's weights.
        generator: turns prompts into trajectories with those engines.
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
        self.cfg = cfg
        self.tracker = tracker
        self.tokenizer = tokenizer
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.inference_engine_client = inference_engine_client
        self.generator = generator
        self.placement = Placement(cfg, colocate_pg)
        self.run_folder = RunFolder(cfg.trainer.run_dir)
        self.checkpoints = CheckpointStore(cfg.trainer.ckpt_path, cfg.trainer.max_ckpts_to_keep)
        self.global_step = 0
        self.all_metrics: dict[str, float] = {}
        self.all_timings: dict[str, float] = {}
        self.policy_model: ActorGroup
        self.ref_model: ActorGroup | None = None
        self.reward_kl_controller = _reward_kl_controller(cfg)
        self._build_dataloaders()

    def _build_dataloaders(self) -> None:
        trainer = self.cfg.trainer
        self.total_training_steps = 0
        if self.train_dataset is not None:
            self.train_dataloader = PromptDataLoader(
                self.train_dataset, trainer.train_batch_size, shuffle=True, drop_last=True, seed=trainer.seed
            )
            steps = len(self.train_dataloader) * trainer.epochs
            self.total_training_steps = min(steps, trainer.max_training_steps or steps)
        self.eval_dataloader = None
        if self.eval_dataset is not None:
            self.eval_dataloader = PromptDataLoader(
                self.eval_dataset, trainer.eval_batch_size, shuffle=False, drop_last=False, seed=trainer.seed
            )

    # ---- the run

    async def train(self) -> None:
        """Answer, judge, learn; repeat."""
        await self.start()
        for prompts in self.batches():
            self.global_step += 1
            with self.timed("step"):
                with self.timed("generate"):
                    trajectories, uids = await self.generate(prompts)
                batch = self.convert_to_training_input(trajectories, uids)
                with self.timed("fwd_logprobs_values_reward"):
                    batch = await self.fwd_logprobs_values_reward(batch)
                with self.timed("compute_advantages_and_returns"):
                    batch = self.apply_reward_kl_penalty(batch)
                    batch = self.compute_advantages_and_returns(batch)
                with self.timed("train_critic_and_policy"):
                    await self.train_policy(batch)
                with self.timed("sync_weights"):
                    await self.sync_weights()
            if self.is_due(self.cfg.trainer.eval_interval):
                await self.evaluate()
            self.log()
            if self.is_due(self.cfg.trainer.ckpt_interval):
                await self.save_checkpoint()
            if self.is_due(self.cfg.trainer.hf_save_interval):
                await self.save_hf_model()

    async def start(self) -> None:
        """Goes on from a checkpoint if there is one, gives the engines the weights, evaluates what is there."""
        self.tracker.total_steps = self.total_training_steps
        await self.load_checkpoint()
        with self.timed("sync_weights"):
            await self.init_weight_sync()
            await self.sync_weights()
        if self.global_step == 0 and self.cfg.trainer.eval_before_train and self.eval_dataloader is not None:
            await self.evaluate()
            self.log()
        self.all_metrics, self.all_timings = {}, {}

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """The prompts of each step that is still to come, epoch after epoch."""
        for _ in range(self.global_step, self.total_training_steps):
            yield self.train_dataloader.next_batch()

    def is_due(self, interval: int) -> bool:
        """Every `interval` steps and after the last one; never if the interval is not positive."""
        return interval > 0 and (self.global_step % interval == 0 or self.global_step == self.total_training_steps)

    def timed(self, name: str) -> Timer:
        return Timer(name, self.all_timings)

    def log(self) -> None:
        """Hands this step's metrics over and starts the next step's."""
        timings = {f"timing/{name}": seconds for name, seconds in self.all_timings.items()}
        if self.global_step and self.train_dataset is not None:
            epoch = (self.global_step - 1) // max(1, len(self.train_dataloader))
            self.all_metrics |= {"trainer/epoch": epoch, "trainer/global_step": self.global_step}
        self.tracker.log(self.all_metrics | timings, step=self.global_step, commit=True)
        self.all_metrics, self.all_timings = {}, {}

    # ---- models

    async def build_models(
        self, policy_worker: type[PolicyWorker] = PolicyWorker, ref_worker: type[RefWorker] = RefWorker
    ) -> None:
        """Starts the workers. The policy loss is looked up here and shipped to them."""
        trainer = self.cfg.trainer
        loss_fn = PolicyLossRegistry.get(trainer.algorithm.policy_loss_type)
        policy_args = (self.cfg, loss_fn, max(1, self.total_training_steps * self._updates_per_step))
        self.policy_model = self.placement.start_group("policy", policy_worker, policy_args, self.run_folder)
        groups = [self.policy_model]
        if trainer.algorithm.uses_reference_model:
            self.ref_model = self.placement.start_group("ref", ref_worker, (self.cfg,), self.run_folder)
            groups.append(self.ref_model)
        await asyncio.gather(*(group.init_model() for group in groups))
        if self.ref_model is not None:
            await self.placement.offload(self.ref_model)

    async def init_weight_sync(self) -> None:
        await self.placement.init_weight_sync(self.policy_model, self.inference_engine_client)

    async def sync_weights(self) -> None:
        """Gives every engine the policy's weights, proven by checksum, under this step's number as version."""
        client = self.inference_engine_client
        await self.placement.wake_engines(client, ["weights"])
        await client.pause_generation("keep")
        sent, *_ = await self.policy_model.call_all("send_weights", self.global_step)
        await client.resume_generation()
        await self.placement.offload(self.policy_model)
        await self.placement.wake_engines(client, ["kv_cache"])
        self.all_metrics |= {f"weight_sync/{name}": value for name, value in sent.items()}

    async def shutdown(self) -> None:
        """Sends what the trackers still hold, and ends the processes of this run. For a run that failed, too."""
        self.tracker.finish()
        for group in (self.policy_model, self.ref_model):
            if group is not None:
                group.kill()
        await self.inference_engine_client.teardown()

    # ---- answer

    async def generate(self, prompts: list[dict[str, Any]]) -> tuple[GeneratorOutput, list[str]]:
        """`n_samples_per_prompt` trajectories for each prompt, and the prompt's uid for each."""
        generator_input, uids = self.generator_input(prompts)
        output = await self.generator.generate(generator_input)
        await self.placement.put_engines_to_sleep(self.inference_engine_client)
        await self.placement.backload(self.policy_model)
        validate_generator_output(len(generator_input["prompts"]), output)
        self._record(output, uids, generator_input)
        return output, uids

    def generator_input(self, prompts: list[dict[str, Any]]) -> tuple[GeneratorInput, list[str]]:
        generator = self.cfg.generator
        return prepare_generator_input(
            prompts,
            generator.n_samples_per_prompt,
            get_sampling_params(generator.sampling_params),
            self.cfg.environment.env_class,
            "train",
            self.global_step,
        )

    def _record(self, output: GeneratorOutput, uids: list[str], generator_input: GeneratorInput) -> None:
        """Metrics of the rollouts, the trajectories on disk, and now and then one on the console."""
        n = self.cfg.generator.n_samples_per_prompt
        rewards = get_metrics_from_generator_output(output, uids)
        self.all_metrics |= output["rollout_metrics"] or {}
        self.all_metrics |= {
            f"reward/avg_pass_at_{n}": rewards["pass_at_n"],
            "reward/avg_raw_reward": rewards["avg_score"],
            "reward/mean_positive_reward": rewards["mean_positive_reward"],
        }
        if self.cfg.trainer.dump_trajectories:
            rows = trajectory_rows(output, uids, self.tokenizer)
            self.run_folder.write_trajectories(self.global_step, "train", rows)
        interval = self.cfg.trainer.print_example_interval
        if interval > 0 and (self.global_step - 1) % interval == 0:
            reward = output["rewards"][0]
            log_example(
                logger,
                generator_input["prompts"][0],
                self.tokenizer.decode(output["response_ids"][0]),
                sum(reward) if isinstance(reward, list) else reward,
            )

    # ---- judge

    def convert_to_training_input(self, output: GeneratorOutput, uids: Sequence[str]) -> TrainingInputBatch:
        """Trajectories as padded tensors. Metadata: `uids`, `response_length`, `valid` (False for a failed rollout)."""
        rewards = [
            reward if isinstance(reward, list) else _at_last_token(reward, len(response))
            for reward, response in zip(output["rewards"], output["response_ids"], strict=True)
        ]
        sequences, attention_mask, response_mask, reward_tensor, loss_mask, log_probs = (
            convert_prompts_responses_to_batch_tensors(
                self.tokenizer,
                output["prompt_token_ids"],
                output["response_ids"],
                rewards,
                output["loss_masks"],
                output["rollout_logprobs"],
            )
        )
        failures = output.get("failures") or [None] * len(uids)
        valid = [failure is None for failure in failures]
        if not any(valid):
            first = next(failure for failure in failures if failure is not None)
            raise SkyRLError(
                f"all {len(valid)} rollouts of step {self.global_step} failed, so there is nothing to learn from. "
                f"The first: {first.kind}: {first.message}"
            )
        return TrainingInputBatch(
            sequences=sequences,
            attention_mask=attention_mask,
            response_mask=response_mask,
            rewards=reward_tensor,
            loss_mask=loss_mask,
            rollout_logprobs=log_probs,
            metadata={"uids": list(uids), "response_length": response_mask.shape[1], "valid": valid},
        )

    async def fwd_logprobs_values_reward(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Adds `action_log_probs` (the policy before this step's updates) and `base_action_log_probs` (the
        reference). The first come later, from the training forward itself, where nothing changes before it: with one
        update a step."""
        if self.ref_model is not None:
            await self.placement.swap(out=self.policy_model, into=self.ref_model)
            batch["base_action_log_probs"] = await self._forward(self.ref_model, batch)
            await self.placement.swap(out=self.ref_model, into=self.policy_model)
        if self._updates_per_step > 1 or self.cfg.trainer.algorithm.use_kl_in_reward:
            batch["action_log_probs"] = await self._forward(self.policy_model, batch)
        return batch

    async def _forward(self, group: ActorGroup, batch: TrainingInputBatch) -> torch.Tensor:
        rows = self._rows_of_ranks(group, batch)
        inputs = batch.select(["sequences", "attention_mask"], ["response_length"])
        shards = await group.call_each("forward", [(inputs.rows(own),) for own in rows])
        return gather_rows(shards, "output", rows)

    def _rows_of_ranks(self, group: ActorGroup, batch: TrainingInputBatch) -> torch.Tensor:
        return rows_of_ranks(len(batch), self._mini_batch_rows, group.num_ranks)

    @property
    def _updates_per_step(self) -> int:
        trainer = self.cfg.trainer
        return trainer.train_batch_size // trainer.policy_mini_batch_size * trainer.update_epochs_per_batch

    @property
    def _mini_batch_rows(self) -> int:
        return self.cfg.trainer.policy_mini_batch_size * self.cfg.generator.n_samples_per_prompt

    def apply_reward_kl_penalty(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """With `use_kl_in_reward`: takes coefficient * KL(policy || reference) off every token's reward."""
        algorithm = self.cfg.trainer.algorithm
        if not algorithm.use_kl_in_reward:
            return batch
        mask = batch.tensor("loss_mask")
        kl = compute_approx_kl(
            batch.tensor("action_log_probs"),
            batch.tensor("base_action_log_probs"),
            mask,
            algorithm.kl_estimator_type,
        )
        coefficient = max(0.0, self.reward_kl_controller.value)
        batch["rewards"] = batch.tensor("rewards") - kl * coefficient
        average = masked_mean(kl, mask, dim=-1).mean().item()
        self.reward_kl_controller.update(average, n_steps=len(batch))
        self.all_metrics |= {
            "loss/avg_kl": average,
            "loss/avg_kl_max": kl.abs().amax(dim=-1).mean().item(),
            "loss/kl_loss_coef": coefficient,
        }
        return batch

    def compute_advantages_and_returns(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Adds `advantages` and `returns`. Failed rollouts are no part of any baseline and get 0."""
        algorithm = self.cfg.trainer.algorithm
        valid = torch.tensor(batch.metadata["valid"])
        uids = [uid for uid, is_valid in zip(batch.metadata["uids"], batch.metadata["valid"], strict=True) if is_valid]
        estimator = AdvantageEstimatorRegistry.get(algorithm.advantage_estimator)
        advantages, returns = estimator(
            token_level_rewards=batch.tensor("rewards")[valid],
            response_mask=batch.tensor("response_mask")[valid],
            index=uids,
            values=None,
            config=algorithm,
            grpo_norm_by_std=algorithm.grpo_norm_by_std,
        )
        mask = batch.tensor("loss_mask")
        if algorithm.advantage_batch_normalize:
            advantages = normalize_advantages(advantages, mask[valid])
        for name, values in {"advantages": advantages, "returns": returns}.items():
            whole = torch.zeros_like(batch.tensor("rewards"))
            whole[valid] = values
            batch[name] = whole
        self.all_metrics |= {
            "loss/avg_final_rewards": batch.tensor("rewards")[valid].sum(dim=-1).mean().item(),
            "loss/avg_raw_advantages": masked_mean(batch.tensor("advantages"), mask).item(),
            "loss/avg_raw_advantages_abs": masked_mean(batch.tensor("advantages").abs(), mask).item(),
        }
        return batch

    # ---- learn

    async def train_policy(self, batch: TrainingInputBatch) -> None:
        """Optimizer steps: one for every mini-batch, `update_epochs_per_batch` times over."""
        algorithm = self.cfg.trainer.algorithm
        max_seq_len = algorithm.max_seq_len
        batch["loss_weights"] = torch.cat(
            [
                token_weights(mini.tensor("loss_mask"), algorithm.loss_reduction, max_seq_len)
                for mini in batch.chunks(self._mini_batch_rows)
            ]
        )
        if self.cfg.trainer.dump_data_batch:
            folder = expand_path(self.cfg.trainer.export_path) / "dumped_data"
            folder.mkdir(parents=True, exist_ok=True)
            batch.save(folder / f"global_step_{self.global_step}_training_input.pkl")
        rows = self._rows_of_ranks(self.policy_model, batch)
        inputs = batch.select([name for name in _WORKER_INPUTS if name in batch], ["response_length"])
        await self.policy_model.call_each("stage", [(inputs.rows(own),) for own in rows])
        num_mini_batches = len(batch) // self._mini_batch_rows
        rows_a_rank = self._mini_batch_rows // self.policy_model.num_ranks
        one_epoch = [
            call
            for i in range(num_mini_batches)
            for call in (("forward_backward", (i * rows_a_rank, (i + 1) * rows_a_rank)), ("optim_step", ()))
        ]
        calls = one_epoch * self.cfg.trainer.update_epochs_per_batch
        if "action_log_probs" in batch:
            answers = await self.policy_model.call_in_turn(calls)
        else:
            *answers, old = await self.policy_model.call_in_turn([*calls, ("old_log_probs", ())])
            batch["action_log_probs"] = gather_rows(old, "output", rows)
        if batch["rollout_logprobs"] is not None:
            self.all_metrics |= _mismatch_metrics(batch)
        self.all_metrics |= _training_metrics(losses=answers[0::2], steps=[ranks[0] for ranks in answers[1::2]])
        self.all_metrics["policy/response_length"] = (
            batch.tensor("response_mask").sum(dim=-1).mean(dtype=torch.float).item()
        )

    # ---- evaluation, checkpoints, exports

    async def evaluate(self) -> None:
        """Scores the evaluation set with the policy as it is."""
        if self.eval_dataloader is None:
            return
        with self.timed("eval"):
            self.all_metrics |= await evaluate(
                self.eval_dataloader, self.generator, self.cfg, self.global_step, self.tokenizer
            )

    async def save_checkpoint(self) -> None:
        """Everything that the rest of the run depends on, in one step or not at all."""
        state = {
            "global_step": self.global_step,
            "dataloader": self.train_dataloader.state_dict(),
            "reward_kl_coef": self.reward_kl_controller.value,
        }
        with self.timed("save_checkpoints"), self.checkpoints.writing(self.global_step) as folder:
            await self.policy_model.call_all("save_checkpoint", str(folder / "policy"))
            write_atomically(folder / "trainer_state.json", json.dumps(state))

    async def load_checkpoint(self) -> None:
        """Goes on where the checkpoint that `resume_mode` asks for was written; a fresh start if there is none."""
        folder = await asyncio.to_thread(self.checkpoints.find, self.cfg.trainer)
        if folder is None:
            self.run_folder.truncate_after(-1)
            return
        with self.timed("load_checkpoints"):
            state = json.loads((folder / "trainer_state.json").read_text())
            await self.policy_model.call_all("load_checkpoint", str(folder / "policy"))
        self.train_dataloader.load_state_dict(state["dataloader"])
        self.reward_kl_controller.value = state["reward_kl_coef"]
        self.global_step = extract_step_from_path(folder)
        self.run_folder.truncate_after(self.global_step)
        logger.info(f"going on after step {self.global_step}, from {folder}")

    async def save_hf_model(self) -> None:
        """Writes the policy as `transformers` loads it, to `<export_path>/global_step_N/policy`."""
        folder = expand_path(self.cfg.trainer.export_path) / f"global_step_{self.global_step}" / "policy"
        with self.timed("save_hf_model"):
            await self.policy_model.call_all("save_hf_model", str(folder), self.tokenizer)


_WORKER_INPUTS = (
    "sequences",
    "attention_mask",
    "loss_mask",
    "loss_weights",
    "advantages",
    "action_log_probs",
    "base_action_log_probs",
    "rollout_logprobs",
)


def _reward_kl_controller(cfg: SkyRLConfig) -> FixedKLController | AdaptiveKLController:
    algorithm = cfg.trainer.algorithm
    if algorithm.kl_ctrl.type == "adaptive":
        return AdaptiveKLController(algorithm.kl_loss_coef, algorithm.kl_ctrl.kl_target, algorithm.kl_ctrl.horizon)
    return FixedKLController(algorithm.kl_loss_coef)


def _at_last_token(reward: float, num_tokens: int) -> list[float]:
    return [0.0] * (num_tokens - 1) + [reward]


def _mismatch_metrics(batch: TrainingInputBatch) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, over the tokens of the loss mask."""
    kept = batch.tensor("loss_mask") > 0
    difference = (batch.tensor("rollout_logprobs") - batch.tensor("action_log_probs"))[kept].abs()
    if not difference.numel():
        return {}
    return {
        "policy/rollout_train_logprobs_abs_diff_mean": difference.mean().item(),
        "policy/rollout_train_logprobs_abs_diff_max": difference.max().item(),
        "policy/rollout_train_logprobs_abs_diff_std": difference.std(correction=0).item(),
    }


def _training_metrics(losses: Sequence[Sequence[MetricSums]], steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps. `losses`: of each step, every rank's sums; `steps`: what each step returned."""
    totals: dict[str, float] = {}
    for ranks in losses:
        summed = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        num_tokens = max(1.0, summed.pop("num_tokens"))
        for name, value in summed.items():
            kind, metric = name.split("/", 1)
            own = f"policy/{metric}" if kind == "loss" or metric in _OWN_NAMES else f"policy/loss_metrics/{metric}"
            totals[own] = totals.get(own, 0.0) + (value if kind == "loss" else value / num_tokens) / len(losses)
    for step in steps:
        for name, value in step.items():
            totals[f"policy/{name}"] = totals.get(f"policy/{name}", 0.0) + value / len(steps)
    return totals


_OWN_NAMES = frozenset({"policy_entropy", "policy_kl"})
