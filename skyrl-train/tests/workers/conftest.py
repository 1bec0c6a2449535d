"""One optimizer step of a real worker group, from the same weights each time, however the work is divided."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ray import cloudpickle

from skyrl_train.algorithms.losses import PolicyLossRegistry, TokenSelectorRegistry
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.config import SkyRLConfig
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.training_backends.base import MetricSums, merge_metric_sums
from skyrl_train.training_batch import TrainingInputBatch, TrainingOutputBatch
from skyrl_train.workers.objectives.critic import CriticObjective
from skyrl_train.workers.objectives.policy import PolicyObjective
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, Worker
from skyrl_train_testing.rank_processes import ForkedRanks

NUM_PROMPT, NUM_RESPONSE = 6, 7


class ResumedPolicy(PolicyWorker):
    """The policy, with a way back to where it began."""

    def restart(self, cfg: SkyRLConfig) -> None:
        loss = cfg.trainer.algorithm.policy_loss_type
        self.backend.cfg = cfg
        self.objective = PolicyObjective(cfg.trainer.algorithm, PolicyLossRegistry.get(loss))
        self._token_selector = TokenSelectorRegistry.get(loss) if loss in TokenSelectorRegistry else None
        self.backend.load_model()

    def selected_tokens(self) -> TrainingOutputBatch:
        return TrainingOutputBatch(output=self.batch.tensor("selected_tokens"))


class ResumedCritic(CriticWorker):
    """The critic, with a way back to where it began."""

    def restart(self, cfg: SkyRLConfig) -> None:
        self.backend.cfg = cfg
        self.objective = CriticObjective(cfg.trainer.algorithm)
        self.backend.load_model()


class Step(NamedTuple):
    """One optimizer step."""

    sums: MetricSums
    """Metric sums of the mini-batch."""

    grad_norm: float
    before: torch.Tensor
    """Log-probs or values [B, R] before it; of the step's own forward, if it was asked for those."""

    weights: dict[str, torch.Tensor]
    """Weights after the step."""

    selected: torch.Tensor | None
    """The tokens [B, R] that the loss treated apart, if it treats any."""


class Learners:
    """Groups of policies and critics, started when they are first needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.groups: dict[tuple[str, int, int], ActorGroup] = {}

    async def group(self, kind: str, cfg: SkyRLConfig, num_ranks: int) -> ActorGroup:
        """The group, at its beginning."""
        settings = cfg.trainer.policy if kind == "policy" else cfg.trainer.critic
        key = kind, num_ranks, settings.sequence_parallel_size
        if key not in self.groups:
            worker: type[Worker] = ResumedPolicy if kind == "policy" else ResumedCritic
            name = "_".join(map(str, key))
            args = (cfg, PolicyLossRegistry.get("regular"), 10) if kind == "policy" else (cfg, 10)
            ranks = ForkedRanks(name, worker, args, num_ranks=num_ranks, log_folder=self.folder)
            self.groups[key] = ActorGroup(name, ranks, device="cpu", timeout_seconds=120)
            await self.groups[key].init_model()
        await self.groups[key].call_all(ResumedPolicy.restart, cfg)
        return self.groups[key]

    def step(self, *args: Any, **kwargs: Any) -> Step:
        """Take a step; arguments of `take_step`."""
        return asyncio.run(self.take_step(*args, **kwargs))

    async def take_step(
        self,
        kind: str,
        cfg: SkyRLConfig,
        batch: TrainingInputBatch,
        num_ranks: int = 1,
        *,
        unit: int = 1,
        stage_old: bool = True,
    ) -> Step:
        """One optimizer step on the whole batch."""
        group = await self.group(kind, cfg, num_ranks)
        schedule = schedule_of(cfg, batch, group.data_parallel_size, unit=unit)
        columns = ("sequences", "attention_mask", "kept_counts", "kept_ids")
        inputs = batch.select([name for name in columns if name in batch])
        args = list(zip(schedule.split(inputs), schedule.merge_mini_batches(), strict=True))
        before = schedule.gather(await group.call_data_parallel(Worker.forward, args), "output")
        full = TrainingInputBatch(dict(batch), metadata=batch.metadata)
        add_advantages_of_trainer(kind, cfg, full, before, stage_old)
        await group.call_data_parallel(Worker.load_batch, [(own,) for own in schedule.split(full)])
        [micro_batches] = schedule.mini_batches
        sums = merge_metric_sums(
            await group.call_data_parallel(Worker.forward_backward, [(own,) for own in micro_batches])
        )
        if not stage_old:
            before = schedule.gather(
                await group.call_data_parallel(PolicyWorker.first_scores, [()] * group.data_parallel_size), "output"
            )
        selected = None
        if kind == "policy" and cfg.trainer.algorithm.policy_loss_type in TokenSelectorRegistry:
            selected = schedule.gather(
                await group.call_data_parallel(ResumedPolicy.selected_tokens, [()] * group.data_parallel_size), "output"
            )
        stepped, *_ = await group.call_all(Worker.optim_step)
        weights, *_ = await group.call_all(Worker.full_state)
        return Step(sums, stepped["grad_norm"], before, weights, selected)


def schedule_of(cfg: SkyRLConfig, batch: TrainingInputBatch, data_parallel_size: int, unit: int = 1) -> Schedule:
    return Schedule.of(
        batch.tensor("attention_mask").sum(dim=1).tolist(),
        [range(len(batch))],
        data_parallel_size,
        micro_batch_size=cfg.trainer.micro_train_batch_size_per_gpu,
        max_tokens=cfg.trainer.max_tokens_per_microbatch,
        unit=unit,
    )


def add_advantages_of_trainer(
    kind: str, cfg: SkyRLConfig, batch: TrainingInputBatch, before: torch.Tensor, old: bool
) -> None:
    """Add the trainer's columns, four rows a prompt. `shift`, if the batch has it, is added to old log-probs."""
    mask = batch.tensor("loss_mask")
    algorithm = cfg.trainer.algorithm
    prompts = [row // 4 for row in range(len(batch))]
    weights = token_weights(mask, algorithm.loss_reduction, max_seq_len=20, index=prompts)
    if kind == "critic":
        batch["values"] = before - torch.nan_to_num(batch.tensor("advantages")) / 2
        batch["returns"] = batch["advantages"]
        batch["critic_loss_weights"] = weights
        return
    if old:
        shift = batch.get("shift")
        batch["action_log_probs"] = before if shift is None else before + shift
    batch["base_action_log_probs"] = before - 0.3 * torch.nan_to_num(batch.tensor("advantages")).sign()
    batch["loss_weights"] = weights


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learners]:
    """Takes optimizer steps on any number of ranks."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
    learners = Learners(tmp_path_factory.mktemp("learners"))
    yield learners
    for group in learners.groups.values():
        group.kill()


@pytest.fixture
def learners_with(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """`learners_with(change)`: as `learners`, with `change(worker class)` in place of the policy's worker class."""
    module, started = sys.modules[__name__], []
    for sent_by_value in (module, request.module):
        cloudpickle.register_pickle_by_value(sent_by_value)

    def make(change: Any) -> Learners:
        monkeypatch.setattr(module, "ResumedPolicy", change(ResumedPolicy))
        started.append(Learners(tmp_path))
        return started[-1]

    yield make
    for learners in started:
        for group in learners.groups.values():
            group.kill()


@pytest.fixture(scope="session")
def config(tiny_model: str) -> Any:
    """Settings of a tiny policy and critic; `policy`, `critic`, `algorithm` add to theirs, others to the trainer's."""

    def make(micro_size: int = 4, policy: Any = None, critic: Any = None, algorithm: Any = None, **trainer: Any) -> Any:
        model = {"model": {"path": tiny_model}, "optimizer_config": {"lr": 1e-2, "weight_decay": 0.0}}
        return SkyRLConfig.from_dict(
            {
                "trainer": {
                    "policy": model | (policy or {}),
                    "critic": model | (critic or {}),
                    "bf16": False,
                    "micro_forward_batch_size_per_gpu": micro_size,
                    "micro_train_batch_size_per_gpu": micro_size,
                    "algorithm": {
                        "use_kl_loss": True,
                        "kl_loss_coef": 0.1,
                        "use_entropy_loss": True,
                        **(algorithm or {}),
                    },
                    **trainer,
                }
            }
        )

    return make


@pytest.fixture
def ragged_batch() -> Any:
    """Rows of different lengths; an environment's words inside some responses; one failed rollout."""

    def make(num_rows: int = 16, columns: Sequence[str] = ()) -> TrainingInputBatch:
        generator = torch.Generator().manual_seed(3)
        sequences = torch.randint(2, 64, (num_rows, NUM_PROMPT + NUM_RESPONSE), generator=generator)
        attention_mask = torch.ones_like(sequences)
        loss_mask = torch.ones(num_rows, NUM_RESPONSE)
        for row in range(num_rows):
            attention_mask[row, : row % 4] = 0
            used = 2 + row % (NUM_RESPONSE - 1)
            attention_mask[row, NUM_PROMPT + used :] = 0
            loss_mask[row, used:] = 0
            if row % 3 == 0:
                loss_mask[row, 1] = 0
        loss_mask[5:6] = 0
        noise = {name: torch.randn(num_rows, NUM_RESPONSE, generator=generator) for name in ("advantages", *columns)}
        return TrainingInputBatch(
            sequences=sequences * attention_mask,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            **noise,
            metadata={"response_length": NUM_RESPONSE},
        )

    return make
