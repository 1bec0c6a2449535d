"""Interface of a training backend, which loads, shards, scores, steps and stores one rank of a model.

A backend is independent of algorithms: it receives an objective, which maps scores of a micro-batch to a loss. An
    objective is independent of ranks: the backend shards, scales and gathers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from skyrl_train.config import CriticConfig, PolicyConfig, RefConfig, SkyRLConfig
from skyrl_train.distributed.process_group import find_free_port, init_process_group
from skyrl_train.distributed.ulysses import SequenceParallel, build_sequence_parallel
from skyrl_train.expert_routes import no_route
from skyrl_train.models.experts import RouterStatistics
from skyrl_train.training_backends.checkpoint import BackgroundWrite, StateFiles, WrittenFiles, write_state
from skyrl_train.training_backends.host_store import HostStore, Transfer
from skyrl_train.training_backends.optimizer import LearningRateSchedule
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.utils.cuda_allocator import release_cached_memory
from skyrl_train.utils.device_copies import copy_to_device
from skyrl_train.utils.gpus import get_indexed_device
from skyrl_train.utils.storage import Place

if TYPE_CHECKING:  # the driver uses only this interface, without a model
    from transformers import PreTrainedModel

ModelName = Literal["policy", "critic", "ref"]
"""Models of a run, as named in settings and metrics."""

MetricSums = dict[str, float]
"""Metrics of a part of a mini-batch. `loss/<name>` are parts of the loss (already weighted), `token/<name>` are sums
over the tokens of the loss mask, `num_tokens` is the number of these tokens; all three add up over parts. `max/<name>`
are maxima."""

MetricScalars = dict[str, torch.Tensor]
"""`MetricSums` as scalars on the device: reading a value waits for the kernels that compute it."""

_WEIGHTS = ("loss_mask", "loss_weights", "critic_loss_weights")


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank of a worker in its group, and the group's rendezvous address."""

    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"

    @property
    def torch_device(self) -> torch.device:
        return get_indexed_device(self.device)


@dataclass(frozen=True, kw_only=True)
class ParallelInfo:
    """Position of a rank among the ranks of its model.

    Consecutive ranks that split the work of a replica (sequence, tensor or pipeline parallel) share a data-parallel
    rank and get the same rows.
    """

    rank: int = 0
    world_size: int = 1
    ranks_per_replica: int = 1
    """Ranks that share a data-parallel rank."""

    holds_outputs: bool = True
    """Whether this rank's scores and metric sums are valid for its rows (only the last pipeline stage)."""

    shares_prefixes: bool = False
    """Common prefixes of a micro-batch are computed once."""

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.ranks_per_replica

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_per_replica


class Scores(NamedTuple):
    """Scores of the response tokens of a micro-batch. b rows, R columns; 0 at padding."""

    output: torch.Tensor
    """[b, R] float32: log-probs under the sampling temperature (policy, reference), or values (critic)."""

    entropy: torch.Tensor | None = None
    """[b, R] float32, in nats; None if not requested."""

    router: RouterStatistics | None = None
    """Expert load of this rank's tokens, in a mixture of experts."""

    routes: torch.Tensor | None = None
    """[b, T, L, k] experts of every token (`expert_routes.py`); None if not requested."""

    candidates: torch.Tensor | None = None
    """[b, R, K] float32: log-probs of the tokens `teacher_ids` of the micro-batch; None without them."""


class Objective(Protocol):
    """Loss of an algorithm: a pure function of scores and of a micro-batch, without a model or a rank."""

    needs_entropy: bool

    def __call__(self, scores: Scores, micro_batch: TrainingInputBatch) -> tuple[torch.Tensor, MetricScalars]:
        """Compute the micro-batch's part of the mini-batch loss, a scalar, and of its metrics.

        Args:
            micro_batch: columns [b, R] on the device of the scores. Weights are relative to the whole mini-batch (parts
                add up to its loss), and 0 in dummy micro-batches.
        """
        ...


@dataclass(frozen=True)
class Gradient:
    """Result of a forward and backward over this rank's part of a mini-batch."""

    sums: MetricSums
    outputs: torch.Tensor
    """[B, R] on the CPU: `Scores.output` of the computed rows, 0 in others."""

    router: RouterStatistics | None
    """Expert load of this rank's tokens; None on every rank in a model without experts."""

    entropies: torch.Tensor | None = None
    """[B, R] on the CPU: `Scores.entropy` of the computed rows, 0 in others; None for an objective without entropy."""


@dataclass(frozen=True)
class Step:
    """Result of an optimizer step."""

    grad_norm: float
    """Global norm before clipping."""

    learning_rate: float
    is_skipped: bool
    """The gradient was not finite, and the weights are unchanged."""


class TrainingBackend(ABC):
    """One rank of a model. Every method except for properties is a collective: all ranks call it, in the same order.

    Args:
        cfg: settings of the run.
        name: the model, configured by `trainer.<name>`.
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule; None for a model that is
            not trained.
    """

    schedule: LearningRateSchedule
    """Learning rates of a trained model, set by `begin_schedule`."""

    def __init__(self, cfg: SkyRLConfig, name: ModelName, num_training_steps: int | None = None):
        self.cfg = cfg
        self.name: ModelName = name
        self.num_training_steps = num_training_steps
        self.device = torch.device("cpu")
        self.parallel = ParallelInfo()
        self.sequence_parallel: SequenceParallel | None = None  # ranks that share this rank's sequences

    @property
    def settings(self) -> PolicyConfig | CriticConfig | RefConfig:
        """Section `trainer.<name>` of the settings."""
        return getattr(self.cfg.trainer, self.name)

    @property
    def trained_settings(self) -> PolicyConfig | CriticConfig:
        """Section `trainer.<name>` of a trained model."""
        settings = self.settings
        assert not isinstance(settings, RefConfig), "the reference model is never trained"
        return settings

    @property
    def is_trained(self) -> bool:
        return self.num_training_steps is not None

    # ---- a backend defines these

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes of a micro-batch are computed once. Known after the model is loaded."""
        return False

    @abstractmethod
    def load_model(self) -> None:
        """Load the model of `trainer.<name>.model.path` and, if it is trained, create an optimizer and schedule."""

    @property
    @abstractmethod
    def transformer(self) -> "PreTrainedModel":
        """The transformers model, which provides config and class for exports."""

    @abstractmethod
    def score(self, micro_batch: TrainingInputBatch, *, with_entropy: bool = False) -> Scores:
        """Run the model on `sequences` and `attention_mask` [b, T], replaying `expert_routes` [b, T, L, k] if present;
        gradients flow if enabled. With `teacher_ids` [b, R, K] (backends whose traits have `candidates`) the scores of
        these tokens are computed, too. With `kept_ids` [b, M] and `kept_counts` [b, R] (backends whose traits have
        `sampling_masks`) the log-probs are normalized over these tokens."""

    @abstractmethod
    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the log-prob, at temperature 1, of each token but the first: [b, T] -> [b, T - 1] float32."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of this rank's part of a mini-batch loss. The mini-batch gradient is the sum over
        data-parallel ranks."""

    @abstractmethod
    def optimizer_step(self) -> Step:
        """Clip the gradient by its global norm, update the weights unless it is not finite, zero it, and advance the
        learning-rate schedule."""

    @abstractmethod
    def gather_parameters(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter gathered, few at a time in the same order on every rank, with adapters merged, under
        the names of transformers; then persistent buffers (`models/persistent_buffers.py`), in their dtype.

        Args:
            dtype: dtype to cast parameters to, before sending if that gives the same bits.
        """

    @abstractmethod
    def load_parameters(self, folder: str) -> None:
        """Replace the weights by a model that `Worker.save_hf_model` wrote."""

    @abstractmethod
    def training_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every trained weight NAME gathered in float32, and its optimizer state: `NAME/exp_avg` and
        `NAME/exp_avg_sq` of the weight's shape, `NAME/step` (a scalar: steps taken); one at a time in the same order on
        every rank. Names are as in transformers or, for adapters, as in peft's files, so that all backends can read
        them.
        """

    @abstractmethod
    def load_training_state(self, files: StateFiles) -> None:
        """Load this rank's part of the training state from files. Optimizer settings of this run are kept. Raises
        CheckpointError if the files do not fit.
        """

    def iter_weights(self) -> Iterator[torch.Tensor]:
        """Yield the tensors on this rank's device that offloading moves besides the optimizer's."""
        yield from ()

    def iter_optimizer_state(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of a trained model that only the optimizer step reads."""
        yield from ()

    # ---- device memory

    @property
    def frees_device(self) -> bool:
        """Whether offloading has device memory to free."""
        return self.device.type == "cuda"

    def offload(self) -> Transfer | None:
        """Free the device's memory until `onload`: of weights, and of the optimizer unless
        `optimizer_config.offload_after_step` is false."""
        if not self.frees_device:
            return None
        transfer = self.host_store.offload([*self.iter_weights(), *self._list_optimizer_state()])
        release_cached_memory(self.device)
        return transfer

    def offload_optimizer(self) -> Transfer | None:
        """Free only the optimizer's memory until `onload`."""
        if not self.frees_device:
            return None
        transfer = self.host_store.offload(self._list_optimizer_state())
        release_cached_memory(self.device)
        return transfer

    def onload(self) -> Transfer | None:
        """Reload to the device what was offloaded."""
        return self.host_store.onload() if self.frees_device else None

    @cached_property
    def host_store(self) -> HostStore:
        """Host memory of the offloaded model."""
        return HostStore(self.device)

    def _list_optimizer_state(self) -> list[torch.Tensor]:
        if self.is_trained and self.trained_settings.optimizer_config.offload_after_step:
            return list(self.iter_optimizer_state())
        return []

    # ---- shared by backends

    def begin_schedule(self) -> None:
        """Start the learning-rate schedule of a new optimizer."""
        assert self.num_training_steps is not None, f"the {self.name} is not trained"
        self.schedule = LearningRateSchedule(self.trained_settings.optimizer_config, self.num_training_steps)

    def save(self, folder: Place) -> WrittenFiles:
        """Write weights, optimizer, schedule and random state. Raises CheckpointError on disk errors."""
        parallel = self.parallel
        tensors = self.training_state()
        return write_state(folder, tensors, self.schedule.num_steps, parallel.rank, parallel.world_size)

    def start_saving(self, folder: Place) -> BackgroundWrite:
        """Copy the data of `save` to host memory, and write it in a thread."""
        parallel = self.parallel
        tensors = self.training_state()
        return BackgroundWrite(folder, tensors, self.schedule.num_steps, parallel.rank, parallel.world_size)

    def load(self, folder: Path) -> None:
        """Restore the state written by `save` under any backend and number of ranks. Optimizer settings of this run are
        kept. Raises CheckpointError if it does not fit."""
        files = StateFiles(folder)
        self.load_training_state(files)
        files.check_all_read()
        self.schedule.num_steps = files.num_steps
        files.restore_random_state(self.parallel.rank)

    def join(self, info: RankInfo) -> None:
        """Join the process group of the model's ranks."""
        self.device = info.torch_device
        timeout = self.cfg.trainer.worker_timeout_seconds
        join_process_group(info, timeout)
        self.parallel = ParallelInfo(
            rank=info.rank, world_size=info.world_size, ranks_per_replica=self.settings.sequence_parallel_size
        )
        self.sequence_parallel = build_sequence_parallel(self.settings.sequence_parallel_size, timeout)

    def score_recording_routes(self, micro_batch: TrainingInputBatch) -> Scores:
        """Run the model as in `score`, and return the routes used. For backends whose traits have `routing_replay`."""
        raise NotImplementedError(f"{type(self).__name__} does not record expert routes")

    def score_top(self, micro_batch: TrainingInputBatch, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and log-probs [b, R, K] of the most likely tokens at each response token, in descending order. For
        backends whose traits have `candidates`."""
        raise NotImplementedError(f"{type(self).__name__} returns only log-probs of response tokens")

    @torch.no_grad()
    def forward_top(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch], num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score all rows by `score_top`. Returns: ids [B, R, K] int32 and log-probs [B, R, K] float32, on the CPU; 0 in
        rows that only dummy micro-batches contain."""
        shape = (len(batch), batch.metadata["response_length"], num_top)
        ids, log_probs = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        for micro_batch in micro_batches:
            rows = torch.tensor(micro_batch.rows)
            top_ids, top = self.score_top(batch.rows(rows), num_top)  # also of dummies: all ranks join every forward
            if not micro_batch.is_dummy:
                ids[rows], log_probs[rows] = top_ids.cpu().int(), top.cpu()
        return ids, log_probs

    def score_each(
        self, micro_batches: Iterable[TrainingInputBatch], *, record_routes: bool = False
    ) -> Iterable[Scores]:
        """Score micro-batches one after another."""
        return map(self.score_recording_routes if record_routes else self.score, micro_batches)

    @torch.no_grad()
    def forward(self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Score all rows without gradients. Returns: `Scores.output` [B, R] on the CPU; 0 in rows that only dummy
        micro-batches contain."""
        parts = (batch.rows(torch.tensor(each.rows)) for each in micro_batches)
        outputs = [scores.output for scores in self.score_each(parts)]
        return _collect_rows((len(batch), batch.metadata["response_length"]), micro_batches, outputs)

    @torch.no_grad()
    def forward_recording_routes(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score all rows like `forward`. Returns: scores [B, R], and the routes used [B, T, L, k], on the CPU."""
        outputs = torch.zeros(len(batch), batch.metadata["response_length"])
        routes: torch.Tensor | None = None
        parts = (batch.rows(torch.tensor(each.rows)) for each in micro_batches)
        for micro_batch, scores in zip(micro_batches, self.score_each(parts, record_routes=True), strict=True):
            assert scores.routes is not None
            if routes is None:  # their shape depends on the model; rows only in dummies keep "no route"
                routes = scores.routes.new_full(
                    (len(batch), *scores.routes.shape[1:]), no_route(scores.routes.dtype), device="cpu"
                )
            if not micro_batch.is_dummy:
                rows = torch.tensor(micro_batch.rows)
                outputs[rows] = scores.output.cpu()
                routes[rows] = scores.routes.cpu()
        assert routes is not None, "a schedule assigns a micro-batch to every rank"
        return outputs, routes

    def forward_backward(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> Gradient:
        """Accumulate the gradient of this rank's part of one mini-batch.

        Args:
            batch: rows of this data-parallel rank. R is metadata `response_length`.
            micro_batches: rows of it; the same number on every rank.
        """
        sums: list[MetricScalars] = []
        outputs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        router: RouterStatistics | None = None
        for micro_batch in micro_batches:
            rows = torch.tensor(micro_batch.rows)
            micro = batch.rows(rows)
            if micro_batch.is_dummy:
                micro = build_dummy(micro)
            scores = self.score(micro, with_entropy=objective.needs_entropy)
            loss, own = objective(scores, micro.map(partial(copy_to_device, device=self.device)))
            self.backward(loss)
            sums.append(own)
            outputs.append(scores.output.detach())
            if scores.entropy is not None:
                entropies.append(scores.entropy.detach())
            if scores.router is not None:
                counted = scores.router.build_zeros() if micro_batch.is_dummy else scores.router
                router = counted if router is None else router + counted
        # Results are read at the end: until then the host queues kernels without waiting for the device.
        shape = (len(batch), batch.metadata["response_length"])
        return Gradient(
            merge_metric_sums(read_scalars(sums)),
            _collect_rows(shape, micro_batches, outputs),
            router,
            _collect_rows(shape, micro_batches, entropies) if objective.needs_entropy else None,
        )


MakeBackend = Callable[[SkyRLConfig, ModelName, int | None], TrainingBackend]
"""Builder of a backend: a subclass of `TrainingBackend`, or a function."""


def join_process_group(info: RankInfo, timeout_seconds: float) -> None:
    """Join this process to a process group as a rank, on its device. Every later collective raises after the
    timeout.
    """
    device = info.torch_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(
        rank=info.rank,
        world_size=info.world_size,
        master_address=info.master_address,
        master_port=info.master_port or find_free_port(),
        device=device,
        timeout_seconds=timeout_seconds,
    )


def build_dummy(micro: TrainingInputBatch) -> TrainingInputBatch:
    """Return a dummy micro-batch: the same rows, with no tokens counted in loss or metrics."""
    zeros = {name: torch.zeros_like(micro.tensor(name)) for name in _WEIGHTS if micro.get(name) is not None}
    return TrainingInputBatch({**micro, **zeros}, metadata=micro.metadata)


def _collect_rows(
    shape: tuple[int, int], micro_batches: Sequence[MicroBatch], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Copy the rows of micro-batches, each [b, R], to [B, R] on the CPU; 0 in rows that only dummies contain."""
    whole = torch.zeros(shape)
    for micro_batch, part in zip(micro_batches, parts, strict=True):
        if not micro_batch.is_dummy:
            whole[torch.tensor(micro_batch.rows)] = part.cpu()
    return whole


def read_scalars(parts: Sequence[MetricScalars]) -> list[MetricSums]:
    """Read the values of micro-batches' metrics, in one transfer. float64 holds each exactly."""
    if not parts:
        return []
    values = iter(torch.stack([value.double() for part in parts for value in part.values()]).tolist())
    return [dict(zip(part, values, strict=False)) for part in parts]


def merge_metric_sums(parts: Iterable[MetricSums]) -> MetricSums:
    """Merge the metrics of micro-batches or ranks."""
    whole: MetricSums = {}
    for part in parts:
        for name, value in part.items():
            if name not in whole:
                whole[name] = value
            else:
                # If one is NaN the maximum is NaN: max() alone may skip it.
                is_maximum = name.startswith("max/") and not math.isnan(whole[name] + value)
                whole[name] = max(whole[name], value) if is_maximum else whole[name] + value
    return whole
