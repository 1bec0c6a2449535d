"""Rank of the policy: trains the model and sends its weights to the rollout engines."""

import platform
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from skyrl_train.algorithms.losses import PolicyLoss, TokenSelector
from skyrl_train.config import SkyRLConfig
from skyrl_train.models.experts import RouterStatistics, compute_auxiliary_loss
from skyrl_train.training_backends.base import Gradient, MakeBackend, MetricSums, ParallelInfo, RankInfo
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch, TrainingOutputBatch
from skyrl_train.utils.gpu_monitor import GpuMonitor, start_monitor
from skyrl_train.utils.io import expand_path
from skyrl_train.weight_sync.base import WeightSource, WeightSyncInitInfo, WrittenBucket
from skyrl_train.weight_sync.cuda_ipc import gpu_uuid
from skyrl_train.weight_sync.fingerprint import fingerprints_of
from skyrl_train.weight_sync.payload import NamedTensor
from skyrl_train.weight_sync.plan import RankLocation
from skyrl_train.weight_sync.rank_sender import RankSender
from skyrl_train.workers.objectives.policy import PolicyObjective
from skyrl_train.workers.profiler import StepProfiler, create_profiler
from skyrl_train.workers.worker import Worker, create_backend


class PolicyWorker(Worker, WeightSource):
    """Rank of the model that is trained to act.

    Args:
        loss_fn: the policy loss function (custom functions are pickled by value).
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule.
        token_selector: the loss's token selection over the whole mini-batch, if it has one.
        make_backend: builder of the backend of `trainer.strategy`; None: looked up here.
    """

    name = "policy"

    def __init__(
        self,
        cfg: SkyRLConfig,
        loss_fn: PolicyLoss,
        num_training_steps: int,
        token_selector: TokenSelector | None = None,
        make_backend: MakeBackend | None = None,
    ):
        objective = PolicyObjective(cfg.trainer.algorithm, loss_fn, cfg.trainer.distillation)
        super().__init__(create_backend(cfg, self.name, num_training_steps, make_backend), objective)
        self._token_selector = token_selector
        self._first_log_probs = self._first_entropies = torch.empty(0)
        self._scored: set[int] = set()
        self._sender: RankSender | None = None
        self._profiler: StepProfiler | None = None
        self._monitor: GpuMonitor | None = None

    def init_model(self, info: RankInfo) -> ParallelInfo:
        """Join the group and load the model. A collective: all ranks must call it."""
        parallel = super().init_model(info)
        self._profiler = create_profiler(self.cfg, info.rank, self.backend.device)
        if self.cfg.trainer.enable_ray_gpu_monitor:
            self._monitor = start_monitor(gpu_uuid(self.backend.device))
        return parallel

    def end_profiled_step(self, step: int) -> None:
        """Notify this rank's profiler, if any, of the end of a training step."""
        if self._profiler is not None:
            self._profiler.end_step(step)

    def take_gpu_load(self) -> dict[str, float]:
        """Return the load of this rank's GPU and machine since the last call; empty without a GPU."""
        return {} if self._monitor is None else self._monitor.get_means()

    # ---- training

    def forward_recording_routes(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]
    ) -> TrainingOutputBatch:
        """Compute log-probs as in `forward`. Returns `output` [b, R], and `expert_routes` [b, T, L, k], the selected
        experts."""
        with self.memory_peaks.measure("forward"):
            output, routes = self.backend.forward_recording_routes(batch, micro_batches)
        return TrainingOutputBatch(output=output, expert_routes=routes)

    def load_batch(self, batch: TrainingInputBatch) -> None:
        """Keep this data-parallel rank's rows of the training batch. Without `action_log_probs` in it, each row's own
        training forward provides the old log-probs, which is exact if a single optimizer step uses all rows."""
        super().load_batch(batch)
        self._first_log_probs = torch.zeros(len(batch), batch.metadata["response_length"])
        self._first_entropies = torch.zeros_like(self._first_log_probs)
        self._scored = set()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> MetricSums:
        """Accumulate the gradient of this rank's part of one mini-batch, given as rows of the loaded batch."""
        # Before the gradient, since it is a collective: all ranks select, then all compute.
        if self._token_selector is not None:
            self.batch["selected_tokens"] = self._select_tokens(self._token_selector, micro_batches)
        gradient = self.add_gradient(micro_batches)
        self._save_first_scores(micro_batches, gradient)
        return gradient.sums | self._compute_router_metrics(gradient.router)

    def _save_first_scores(self, micro_batches: Sequence[MicroBatch], gradient: Gradient) -> None:
        """Keep log-probs and entropies of the rows that are computed for the first time since `load_batch`."""
        computed = {row for micro_batch in micro_batches if not micro_batch.is_dummy for row in micro_batch.rows}
        # Later epochs score the rows again with updated weights: only the first scores precede the step.
        rows = sorted(computed - self._scored)
        self._scored |= computed
        mask = self.batch.tensor("loss_mask")[rows] != 0
        # torch.where instead of a product: log-probs outside the mask may be -inf, and -inf * 0 is NaN.
        self._first_log_probs[rows] = torch.where(mask, gradient.outputs[rows], 0.0)
        if gradient.entropies is not None:
            self._first_entropies[rows] = torch.where(mask, gradient.entropies[rows], 0.0)

    def first_scores(self) -> TrainingOutputBatch:
        """Return log-probs (used as `action_log_probs` if the batch has none) and entropies of each row's first
        training forward, as `output` and `entropies` [b, R]; 0 outside the loss mask."""
        return TrainingOutputBatch(output=self._first_log_probs, entropies=self._first_entropies)

    @torch.no_grad()
    def _select_tokens(self, selector: TokenSelector, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Select the tokens [b, R] bool of the loaded rows that the loss treats separately, over the rows of the
        mini-batch on all ranks. A collective."""
        log_probs = self.backend.forward(self.batch, micro_batches)
        rows = [row for micro_batch in micro_batches if not micro_batch.is_dummy for row in micro_batch.rows]
        columns = [log_probs]
        for name in ("action_log_probs", "advantages", "loss_mask", "token_noise"):
            # A missing column is filled by another one: every rank sends the same shape.
            columns.append(log_probs if self.batch.get(name) is None else self.batch.tensor(name).float())
        own = torch.stack([column[rows] for column in columns], dim=1)  # [rows, 5, R]
        whole, start = gather_rows(own, self.parallel)
        now, old, advantages, mask, noise = whole.to(self.backend.device).unbind(dim=1)
        # Every rank computes the same selection from the same rows, in rank order, and keeps its part.
        chosen = selector(now, old, advantages, mask, noise, self.cfg.trainer.algorithm)
        selected = torch.zeros(log_probs.shape, dtype=torch.bool)
        selected[rows] = chosen[start : start + len(rows)].cpu()
        return selected

    def _compute_router_metrics(self, router: RouterStatistics | None) -> MetricSums:
        """Compute the load-balancing loss of a mixture of experts over the tokens of the mini-batch (measured, not
        trained on), and the fraction of replayed experts that the routers would not select now. Metrics are summed over
        ranks, so only the first data-parallel rank reports them. A collective."""
        if router is None:
            return {}
        # Counts are summed before the loss is computed, since the loss is not linear in them.
        whole = sum_over_ranks(router, self.parallel)
        metrics = {"loss/router_auxiliary_loss": compute_auxiliary_loss(whole)}
        if self.batch.get("expert_routes") is not None:
            metrics["loss/replayed_routes_differing"] = whole.num_differing / max(1.0, float(whole.counts.sum()))
        is_first = (
            self.parallel.data_parallel_rank == 0
        )  # metrics are read from one of its ranks, not necessarily rank 0
        return {name: value if is_first else 0.0 for name, value in metrics.items()}

    # ---- weights on their way to the engines (in the order of `orchestration/weight_publisher.py`)

    def place(self) -> RankLocation:
        """Return the machine and GPU of this rank."""
        return RankLocation(node=platform.node(), gpu=gpu_uuid(self.backend.device))

    def connect_engines(self, init_infos: Sequence[WeightSyncInitInfo]) -> None:
        self._close_engine_connections()
        self._sender = RankSender(
            init_infos, self.parallel.rank, self.backend.device, self._parameters, max_bucket_bytes=self._bucket_bytes
        )

    def stage_bucket(self, version: int, index: int) -> bool:
        return self._connected.stage_bucket(version, index)

    def write_bucket(self, version: int, index: int, held_version: int | None) -> WrittenBucket:
        return self._connected.write_bucket(version, index, held_version)

    def finish_sync(self, version: int) -> None:
        self._connected.finish(version)

    def abort_sync(self) -> None:
        if self._sender is not None:
            self._sender.abort()

    def write_adapters(self, version: int) -> dict[str, int]:
        """Write only the adapters, for engines to load, and delete older versions. A collective.

        Returns:
            on rank 0, the fingerprint of each adapter tensor.
        """
        from skyrl_train.models.adapter_files import write_adapter_version  # heavy: the driver imports this module too

        folder = expand_path(self.cfg.generator.weight_sync_directory) / "adapters"
        written = write_adapter_version(
            self.backend.transformer, folder, version, self._engine_dtype, self.parallel.rank
        )
        return fingerprints_of(written.items(), version, self._verification)

    @torch.no_grad()
    def log_probs_of_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the log-prob (temperature 1) of each token except the first, for prompts of equal length. A
        collective."""
        return self.backend.prompt_log_probs(torch.tensor(prompts)).tolist()

    @property
    def _engine_dtype(self) -> torch.dtype:
        return getattr(torch, self.cfg.generator.model_dtype)

    def teardown(self) -> None:
        """End weight sync, profile and monitor."""
        self._close_engine_connections()
        if self._profiler is not None:
            self._profiler.close()
        if self._monitor is not None:
            self._monitor.close()
        self._profiler = self._monitor = None

    def _close_engine_connections(self) -> None:
        """Close this rank's end of weight sync, which owns memory that engines read."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    @property
    def _bucket_bytes(self) -> int:
        return int(self.cfg.generator.weight_transfer_threshold_cuda_ipc_GB * 1e9)

    @property
    def _verification(self) -> Literal["sampled", "full", "off"]:
        return self.cfg.generator.weight_sync_verification

    def _parameters(self) -> Iterator[NamedTensor]:
        return self.backend.gather_parameters(self._engine_dtype)

    @property
    def _connected(self) -> RankSender:
        if self._sender is None:
            raise ValueError("no engines are connected: connect_engines() comes first")
        return self._sender


def gather_rows(own: torch.Tensor, parallel: ParallelInfo) -> tuple[torch.Tensor, int]:
    """Concatenate the rows [n, ...] of all data-parallel ranks, in rank order. A collective.

    Returns:
        all rows on the CPU, and the position of this rank's first row.
    """
    if parallel.world_size == 1:
        return own, 0
    of_ranks: list[tuple[int, torch.Tensor]] = [(0, own)] * parallel.world_size
    # Objects, since ranks may have different numbers of rows; once per mini-batch, and only for losses with a selector.
    dist.all_gather_object(of_ranks, (parallel.data_parallel_rank, own))
    # Ranks of a replica have the same rows, so one rank of each replica counts. (The order of the process group may
    # differ from the order of replicas.)
    rows = dict(of_ranks)
    of_replicas = [rows[replica] for replica in range(parallel.data_parallel_size)]
    return torch.cat(of_replicas), sum(len(part) for part in of_replicas[: parallel.data_parallel_rank])


def sum_over_ranks(statistics: RouterStatistics, parallel: ParallelInfo) -> RouterStatistics:
    """Sum the statistics of all ranks. A collective."""
    # One collective for both. float64 counts exactly, independent of the order of ranks.
    sums = torch.stack([statistics.counts, statistics.probability_sums]).double()
    numbers = torch.tensor([statistics.num_tokens, statistics.num_differing], device=sums.device, dtype=torch.float64)
    if parallel.world_size > 1:
        dist.all_reduce(sums)
        dist.all_reduce(numbers)
    return RouterStatistics(sums[0], sums[1], int(numbers[0]), float(numbers[1]))
