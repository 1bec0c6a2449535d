"""Interface of a training backend: how one rank of a model is loaded, divided, scored, stepped and stored.

A backend knows no algorithm: it is given an objective, which turns scores of a micro-batch into a loss. An objective
knows no rank: the backend divides, scales and gathers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from skyrl_train.config import CriticConfig, PolicyConfig, RefConfig, SkyRLConfig
from skyrl_train.distributed.process_group import free_port, init_process_group
from skyrl_train.distributed.ulysses import SequenceParallel, make_sequence_parallel
from skyrl_train.models.experts import RouterStatistics
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch

ModelName = Literal["policy", "critic", "ref"]
"""Models of a run, as settings and metrics name them."""

MetricSums = dict[str, float]
"""Metrics of a part of a mini-batch: `loss/<name>` are parts of the loss (already weighted), `token/<name>` are sums
over the tokens of the loss mask, whose number is `num_tokens`; these add up over parts. `max/<name>` are maxima."""

_WEIGHTS = ("loss_mask", "loss_weights", "critic_loss_weights")


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank of a worker in its group, and the address at which the group meets."""

    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class ParallelInfo:
    """Position of a rank among the ranks of its model.

    Consecutive ranks that hold parts of one replica's work (sequence, tensor or pipeline parallel) share a
    data-parallel rank: they are given the same rows.
    """

    rank: int = 0
    world_size: int = 1
    ranks_per_replica: int = 1
    """Ranks that share a data-parallel rank."""

    holds_outputs: bool = True
    """Scores and metric sums of this rank are those of its rows (false for all but the last pipeline stage)."""

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.ranks_per_replica

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_per_replica


class Scores(NamedTuple):
    """Scores of the response tokens of a micro-batch. b rows, R columns; 0 at padding."""

    output: torch.Tensor
    """[b, R] float32: log-probs under the temperature of sampling (policy, reference), or values (critic)."""

    entropy: torch.Tensor | None = None
    """[b, R] float32, in nats; None where it was not asked for."""

    router: RouterStatistics | None = None
    """Use of the experts by the tokens of this rank, in a mixture of experts."""


class Objective(Protocol):
    """Loss of an algorithm: a pure function of scores and of a micro-batch, without a model or a rank."""

    needs_entropy: bool

    def __call__(self, scores: Scores, micro_batch: TrainingInputBatch) -> tuple[torch.Tensor, MetricSums]:
        """Compute the micro-batch's part of the mini-batch's loss, a scalar, and of its metrics.

        Args:
            micro_batch: columns [b, R] on the device of the scores. Their weights are those of the whole mini-batch
                (parts add up to its loss), and 0 in dummy micro-batches.
        """
        ...


@dataclass(frozen=True)
class Gradient:
    """Result of a forward and backward over this rank's part of a mini-batch."""

    sums: MetricSums
    outputs: torch.Tensor
    """[B, R] on the CPU: `Scores.output` of the rows that were computed, 0 in others."""

    router: RouterStatistics | None
    """Use of the experts by this rank's tokens; None in a model without experts, on every rank alike."""


@dataclass(frozen=True)
class Step:
    """Result of an optimizer step."""

    grad_norm: float
    """Global, before clipping."""

    learning_rate: float
    is_skipped: bool
    """The gradient was not finite, and the weights are as before."""


@dataclass(frozen=True)
class WrittenFiles:
    """Report of one rank about a folder that all ranks wrote into.

    Args:
        node: the machine's name and address.
        sizes: bytes by file name, relative to the folder: this rank's own files, and those of its peers that it sees.
    """

    node: str
    sizes: dict[str, int]


class TrainingBackend(ABC):
    """Holder of one rank of a model. Every method but properties is a collective: all ranks call it, in the same order.

    Args:
        cfg: settings of the run.
        name: the model, whose settings are `trainer.<name>`.
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule; None for a model that is
            not trained.
    """

    def __init__(self, cfg: SkyRLConfig, name: ModelName, num_training_steps: int | None = None):
        self.cfg = cfg
        self.name: ModelName = name
        self.num_training_steps = num_training_steps
        self.device = torch.device("cpu")
        self.parallel = ParallelInfo()
        self.sequence_parallel: SequenceParallel | None = None  # the ranks that share this rank's sequences

    @property
    def settings(self) -> PolicyConfig | CriticConfig | RefConfig:
        """Section `trainer.<name>` of the settings."""
        return getattr(self.cfg.trainer, self.name)

    @property
    def trained_settings(self) -> PolicyConfig | CriticConfig:
        """Section `trainer.<name>` of a model that is trained."""
        settings = self.settings
        assert not isinstance(settings, RefConfig), "the reference model is never trained"
        return settings

    @property
    def is_trained(self) -> bool:
        return self.num_training_steps is not None

    # ---- a backend defines these

    @abstractmethod
    def load_model(self) -> None:
        """Load the model of `trainer.<name>.model.path` and, if it is trained, make a new optimizer and schedule."""

    @property
    @abstractmethod
    def transformer(self) -> PreTrainedModel:
        """The transformers model, whose config and class exports have."""

    @abstractmethod
    def score(self, micro_batch: TrainingInputBatch, *, with_entropy: bool = False) -> Scores:
        """Run the model on `sequences` and `attention_mask` [b, T]; gradients flow where they are enabled."""

    @abstractmethod
    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the log-prob, at temperature 1, of each token but the first: [b, T] -> [b, T - 1] float32."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's part of a mini-batch's loss. The gradient of the mini-batch is that of the
        sum over data-parallel ranks."""

    @abstractmethod
    def optimizer_step(self) -> Step:
        """Clip the gradient by its global norm, update the weights unless it is not finite, forget it, and advance the
        learning-rate schedule."""

    @abstractmethod
    def gather_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter whole, one at a time in the same order on every rank, with adapters merged, under the
        names of transformers."""

    @abstractmethod
    def load_parameters(self, folder: str) -> None:
        """Replace the weights by those of a model that `Worker.save_hf_model` wrote."""

    @abstractmethod
    def save(self, folder: Path) -> WrittenFiles:
        """Write weights, optimizer, schedule and random state. Raises CheckpointError if the disk refuses."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, on any number of ranks. The optimizer's settings stay those of this
        run. Raises CheckpointError if it does not fit."""

    def offload(self) -> None:  # noqa: B027  a backend on a CPU has nothing to give
        """Free the device's memory until `onload`."""

    def onload(self) -> None:  # noqa: B027
        """Take the device again."""

    # ---- shared by backends that compute one micro-batch after the other

    def join(self, info: RankInfo) -> None:
        """Join the process group of the model's ranks."""
        self.device = torch.device(info.device)
        timeout = self.cfg.trainer.worker_timeout_seconds
        join_process_group(info, timeout)
        self.parallel = ParallelInfo(
            rank=info.rank, world_size=info.world_size, ranks_per_replica=self.settings.sequence_parallel_size
        )
        self.sequence_parallel = make_sequence_parallel(self.settings.sequence_parallel_size, timeout)

    @torch.no_grad()
    def forward(self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Score all rows without gradients. Returns: `Scores.output` [B, R] on the CPU; 0 in rows that only dummy
        micro-batches hold."""
        outputs = torch.zeros(len(batch), batch.metadata["response_length"])
        for micro_batch in micro_batches:
            rows = torch.tensor(micro_batch.rows)
            scores = self.score(batch.rows(rows))
            if not micro_batch.is_dummy:
                outputs[rows] = scores.output.cpu()
        return outputs

    def forward_backward(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> Gradient:
        """Add the gradient of this rank's part of one mini-batch.

        Args:
            batch: rows of this data-parallel rank. R is metadata `response_length`.
            micro_batches: rows of it; the same number on every rank.
        """
        sums: list[MetricSums] = []
        outputs = torch.zeros(len(batch), batch.metadata["response_length"])
        router: RouterStatistics | None = None
        for micro_batch in micro_batches:
            rows = torch.tensor(micro_batch.rows)
            micro = batch.rows(rows)
            if micro_batch.is_dummy:
                micro = without_weight(micro)
            scores = self.score(micro, with_entropy=objective.needs_entropy)
            loss, own = objective(scores, micro.to(self.device))
            self.backward(loss)
            sums.append(own)
            if not micro_batch.is_dummy:
                outputs[rows] = scores.output.detach().cpu()
            if scores.router is not None:
                counted = scores.router.zeros() if micro_batch.is_dummy else scores.router
                router = counted if router is None else router + counted
        return Gradient(merge_metric_sums(sums), outputs, router)


MakeBackend = Callable[[SkyRLConfig, ModelName, int | None], TrainingBackend]
"""Builder of a backend: a subclass of `TrainingBackend`, or a function."""


def join_process_group(info: RankInfo, timeout_seconds: float) -> None:
    """Make this process a rank of a group, on its device. Every later collective ends by the timeout or raises."""
    device = torch.device(info.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(
        rank=info.rank,
        world_size=info.world_size,
        master_address=info.master_address,
        master_port=info.master_port or free_port(),
        device=device,
        timeout_seconds=timeout_seconds,
    )


def without_weight(micro: TrainingInputBatch) -> TrainingInputBatch:
    """Return a dummy micro-batch: the same rows, of which no token counts in loss or metrics."""
    zeros = {name: torch.zeros_like(micro.tensor(name)) for name in _WEIGHTS if micro.get(name) is not None}
    return TrainingInputBatch({**micro, **zeros}, metadata=micro.metadata)


def merge_metric_sums(parts: Iterable[MetricSums]) -> MetricSums:
    """Merge the metrics of micro-batches or ranks into those of the whole."""
    whole: MetricSums = {}
    for part in parts:
        for name, value in part.items():
            if name not in whole:
                whole[name] = value
            else:
                # Where one is NaN the maximum is: max() alone may pass over it.
                is_maximum = name.startswith("max/") and not math.isnan(whole[name] + value)
                whole[name] = max(whole[name], value) if is_maximum else whole[name] + value
    return whole
