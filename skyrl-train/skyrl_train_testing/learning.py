"""Training of tiny models in one process, on a CPU, in seconds: the trainer's batch preparation, workers and losses,
without Ray or engines.

    outcome = learn(Bandit(), {"advantage_estimator": "rloo", "policy_loss_type": "my_loss"})
    assert outcome.after > 0.9

A step samples from a plain transformers model that gets the policy's weights, as an engine does.

Shapes: B rows, T prompt and response columns, R response columns.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.losses import PolicyLossRegistry, TokenSelectorRegistry
from skyrl_train.batch_preparation import loss_weights, mini_batches_of_prompts, prepare_training_batch
from skyrl_train.config import SkyRLConfig
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.rollouts.padding import convert_prompts_responses_to_batch_tensors
from skyrl_train.training_backends.base import MetricSums, RankInfo
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, RefWorker, Worker
from skyrl_train_testing.tasks import Task


@dataclass
class Episode:
    """Rollout of the kit. Lists of one entry a response token."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """1 on the model's tokens, 0 on the environment's."""

    rewards: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probs as reported by the sampler; 0 on the environment's tokens."""

    turns: list[list[int]] = field(default_factory=list)
    is_over: bool = False

    def add(self, words: Sequence[int], written: int, log_probs: Sequence[float]) -> None:
        self.response += words
        self.written += [written] * len(words)
        self.rewards += [0.0] * len(words)
        self.log_probs += log_probs


@dataclass(frozen=True)
class Outcome:
    """Mean rewards before and after, and the metrics of every step."""

    before: float
    after: float
    steps: list[MetricSums]


class Apprentice:
    """Policy that learns a task, with critic and reference model where needed.

    Args:
        algorithm: settings of `trainer.algorithm` that differ from the defaults (without KL term).
        settings: other settings, in sections: {"generator": {"sampling_params": {"temperature": 0.5}}}.
        num_steps: total training steps; the learning rate decays to 0.
        num_samples: rollouts of each prompt in a step.
        seed: of the model's first weights and of sampling.
    """

    def __init__(
        self,
        task: Task,
        algorithm: Mapping[str, Any] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        num_steps: int = 20,
        num_samples: int = 32,
        seed: int = 0,
        learning_rate: float = 1e-2,
    ):
        self.task = task
        self.num_samples = num_samples
        self._draws = torch.Generator().manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            save_tiny_model(folder, task.num_words, seed)
            self.cfg = make_settings(task, folder, algorithm or {}, settings or {}, num_samples, learning_rate)
            self.engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            kind = self.cfg.trainer.algorithm.policy_loss_type
            has_selector = kind in TokenSelectorRegistry.list_available()
            selector = TokenSelectorRegistry.get(kind) if has_selector else None
            trainer = self.cfg.trainer
            updates = -(-len(task.prompts) // trainer.policy_mini_batch_size) * trainer.update_epochs_per_batch
            num_updates = num_steps * updates
            self.policy = PolicyWorker(self.cfg, PolicyLossRegistry.get(kind), num_updates, selector)
            self.critic = CriticWorker(self.cfg, num_updates) if self._needs_critic else None
            self.ref = RefWorker(self.cfg) if self.cfg.trainer.algorithm.uses_reference_model else None
            for worker in (self.policy, self.critic, self.ref):
                if worker is not None:
                    start(worker)

    @property
    def _needs_critic(self) -> bool:
        return (
            AdvantageEstimatorRegistry.get_requirements(self.cfg.trainer.algorithm.advantage_estimator).critic is True
        )

    # ---- one step, as the trainer takes it

    def step(self) -> MetricSums:
        """Take one training step. Returns: metrics of the first optimizer step and of batch preparation, mean
        reward."""
        episodes, names = self.rollouts(self.num_samples)
        batch = self.batch_of(episodes, names)
        mini_batches = mini_batches_of_prompts(names, self.cfg.trainer.policy_mini_batch_size)
        schedule = self.schedule(batch, mini_batches)
        batch = self.with_forwards(batch, schedule)
        batch, preparation = prepare_training_batch(batch, self.cfg, self.cfg.trainer.algorithm.kl_loss_coef)
        algorithm = self.cfg.trainer.algorithm
        weights = loss_weights(batch, mini_batches, algorithm.loss_reduction, algorithm.max_seq_len)
        batch["loss_weights"] = batch["critic_loss_weights"] = weights
        metrics = self.train(self.policy, batch, schedule)
        if self.critic is not None:
            self.train(self.critic, batch, schedule)
        return {**preparation, **metrics, "reward": mean_reward(episodes)}

    def schedule(self, batch: TrainingInputBatch, mini_batches: list[list[int]]) -> Schedule:
        lengths = batch.tensor("attention_mask").sum(dim=1).tolist()
        size = self.cfg.trainer.micro_train_batch_size_per_gpu
        return Schedule.of(lengths, mini_batches, 1, micro_batch_size=size)

    def with_forwards(self, batch: TrainingInputBatch, schedule: Schedule) -> TrainingInputBatch:
        """The batch with what models say of it before anything is learnt."""
        columns = {"action_log_probs": self.policy, "base_action_log_probs": self.ref, "values": self.critic}
        [micro_batches], [rows] = schedule.merge_mini_batches(), schedule.split(batch)
        for name, worker in columns.items():
            if worker is not None:
                batch[name] = schedule.gather([worker.forward(rows, micro_batches)], "output")
        return batch

    def train(self, worker: Worker, batch: TrainingInputBatch, schedule: Schedule) -> MetricSums:
        """Optimizer steps over all mini-batches; the metrics of the first."""
        [rows] = schedule.split(batch)
        worker.load_batch(rows)
        metrics = []
        for _ in range(self.cfg.trainer.update_epochs_per_batch):
            for [micro_batches] in schedule.mini_batches:
                sums = worker.forward_backward(micro_batches)
                metrics.append(sums | worker.optim_step())
        return metrics[0] | {"num_optimizer_steps": float(len(metrics))}

    # ---- rollouts

    def rollouts(self, num_samples: int) -> tuple[list[Episode], list[str]]:
        """`num_samples` episodes for each prompt under the policy as it is, and the name of each one's prompt."""
        self.sync_engine()
        prompts = self.task.prompts
        episodes = [Episode(list(prompt)) for prompt in prompts for _ in range(num_samples)]
        while live := [episode for episode in episodes if not episode.is_over]:
            words, log_probs = self._turn(live)
            for episode, own_words, own_log_probs in zip(live, words, log_probs, strict=True):
                episode.add(own_words, 1, own_log_probs)
                episode.turns.append(own_words)
                reward, reply = self.task.reply(episode.prompt, episode.turns)
                episode.rewards[-1] = reward
                episode.is_over = reply is None
                if reply is not None:
                    episode.add(reply, 0, [0.0] * len(reply))
        return episodes, [str(i) for i in range(len(prompts)) for _ in range(num_samples)]

    @torch.no_grad()
    def sync_engine(self) -> None:
        """Copy the policy's weights to the sampler."""
        self.engine.load_state_dict(self.policy.full_state())

    @torch.no_grad()
    def _turn(self, episodes: list[Episode]) -> tuple[list[list[int]], list[list[float]]]:
        """The next turn of each episode, token by token, with its log-probs. All of them have the same length."""
        ids = torch.tensor([episode.prompt + episode.response for episode in episodes])
        log_probs = []
        for _ in range(self.task.num_tokens):
            logits = self.engine(input_ids=ids, use_cache=False).logits[:, -1].float()
            distribution = (logits / self.cfg.generator.sampling_params.temperature).log_softmax(-1)
            word = torch.multinomial(distribution.exp(), 1, generator=self._draws)
            log_probs.append(distribution.gather(1, word))
            ids = torch.cat([ids, word], dim=1)
        return ids[:, -self.task.num_tokens :].tolist(), torch.cat(log_probs, dim=1).tolist()

    def batch_of(self, episodes: list[Episode], names: list[str]) -> TrainingInputBatch:
        """Collate episodes into the trainer's tensors."""
        sequences, attention_mask, response_mask, rewards, loss_mask, log_probs = (
            convert_prompts_responses_to_batch_tensors(
                SimpleNamespace(pad_token_id=0),  # type: ignore[arg-type]  # the only attribute of the tokenizer that is used
                [episode.prompt for episode in episodes],
                [episode.response for episode in episodes],
                [episode.rewards for episode in episodes],
                [episode.written for episode in episodes],
                [episode.log_probs for episode in episodes],
            )
        )
        return TrainingInputBatch(
            sequences=sequences,
            attention_mask=attention_mask,
            response_mask=response_mask,
            rewards=rewards,
            loss_mask=loss_mask,
            rollout_logprobs=log_probs,
            token_noise=torch.rand(rewards.shape, generator=self._draws),
            metadata={"uids": names, "response_length": rewards.shape[1], "valid": [True] * len(names)},
        )

    def reward(self, num_samples: int = 32) -> float:
        """Mean reward of fresh rollouts."""
        return mean_reward(self.rollouts(num_samples)[0])


def learn(task: Task, algorithm: Mapping[str, Any] | None = None, *, num_steps: int = 20, **options: Any) -> Outcome:
    """Train a tiny model on a task. Equal arguments (`options` are `Apprentice`'s) give equal results, bit for bit.

    Returns:
        the mean reward of fresh rollouts before and after, to be held against `task.at_random` and `task.optimum`.
    """
    apprentice = Apprentice(task, algorithm, num_steps=num_steps, **options)
    before = apprentice.reward()
    steps = [apprentice.step() for _ in range(num_steps)]
    return Outcome(before, apprentice.reward(), steps)


def mean_reward(episodes: Sequence[Episode]) -> float:
    return sum(sum(episode.rewards) for episode in episodes) / len(episodes)


def save_tiny_model(folder: str | Path, num_words: int, seed: int, hidden_size: int = 32) -> None:
    """A Qwen3 of one layer with random weights."""
    config = Qwen3Config(
        vocab_size=num_words,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=hidden_size // 2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)


def make_settings(
    task: Task,
    model: str,
    algorithm: Mapping[str, Any],
    settings: Mapping[str, Any],
    num_samples: int,
    learning_rate: float,
) -> SkyRLConfig:
    """float32, one process, two optimizer steps on every batch (so that ratios leave 1)."""
    num_prompts = len(task.prompts)
    # Adam's usual second beta of 0.999 remembers for so long that, once nearly all rewards are equal, one that is not
    # throws the policy off: by then the gradients it is measured by are tiny.
    optimizer = {
        "lr": learning_rate,
        "weight_decay": 0.0,
        "max_grad_norm": 10.0,
        "adam_betas": [0.9, 0.95],
        "scheduler": "linear",
    }
    trainer = {
        "policy": {"model": {"path": model}, "optimizer_config": optimizer},
        "critic": {"model": {"path": model}, "optimizer_config": optimizer},
        "placement": {"device": "cpu"},
        "bf16": False,
        "gradient_checkpointing": False,
        "train_batch_size": num_prompts,
        "policy_mini_batch_size": num_prompts,
        "critic_mini_batch_size": num_prompts,
        "update_epochs_per_batch": 2,
        "micro_train_batch_size_per_gpu": 1024,
        "algorithm": {"use_kl_loss": False, "max_seq_len": 8, **algorithm},
        **settings.get("trainer", {}),
    }
    generator = {"n_samples_per_prompt": num_samples, **settings.get("generator", {})}
    return SkyRLConfig.from_dict({"trainer": trainer, "generator": generator})


def start(worker: Worker) -> None:
    """Load a worker's model, alone in its group. All workers of this process share one process group."""
    worker.init_model(RankInfo())
