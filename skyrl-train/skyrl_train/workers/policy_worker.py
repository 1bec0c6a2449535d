"""One rank of the policy: its loss, and its weights on their way out."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLoss, TokenSelector, importance_ratio
from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.config import PolicyConfig, SkyRLConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.adapter_files import write_adapter_version
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.experts import RouterStatistics, auxiliary_loss
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch, TrainingOutputBatch, shape_of
from skyrl_train.utils.io import expand_path
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.weight_sync.fingerprint import fingerprints_of
from skyrl_train.weight_sync.sender import Bucket, EngineHandles, WeightSender, buckets_of, needs_staging
from skyrl_train.workers.learner import LearnerWorker, MetricSums


class PolicyWorker(LearnerWorker):
    """The model that learns to act.

    Args:
        loss_fn: the policy loss, as a function (a user's own comes here by value).
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule.
        token_selector: the loss's choice of tokens over the whole mini-batch, if it has one.
    """

    name = "policy"
    model: ScoringModel

    def __init__(
        self,
        cfg: SkyRLConfig,
        loss_fn: PolicyLoss,
        num_training_steps: int,
        token_selector: TokenSelector | None = None,
    ):
        super().__init__(cfg, num_training_steps)
        self._loss_fn = loss_fn
        self._token_selector = token_selector
        self._old_log_probs = torch.empty(0)
        self._router: list[RouterStatistics] = []
        self._sender: WeightSender | None = None
        self._stages = False

    @property
    def settings(self) -> PolicyConfig:
        return self.cfg.trainer.policy

    @property
    def transformer(self) -> PreTrainedModel:
        return self.model.causal_lm

    def build(self, path: str, *, with_weights: bool) -> ScoringModel:
        """The model with its adapters."""
        transformer = load_causal_lm(path, with_weights=with_weights, **self.loading())
        self.add_adapters(transformer, with_weights=with_weights)
        return ScoringModel(
            transformer,
            chunk_size=self.cfg.trainer.logprobs_chunk_size,
            compile=self.settings.use_torch_compile,
            **self.layout(),
        )

    # ---- learning

    def stage(self, batch: TrainingInputBatch) -> None:
        """Keeps this shard's rows of the whole training batch; `forward_backward` then names rows of it. Without
        `action_log_probs` in it, each row's own forward stands for them: right if one optimizer step takes all rows."""
        super().stage(batch)
        self._old_log_probs = torch.zeros(len(batch), batch.metadata["response_length"])

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> MetricSums:
        """Adds the gradient of this shard's part of one mini-batch, given as rows of what was staged."""
        if self._token_selector is not None:
            self._staged["selected_tokens"] = self._selected_tokens(self._token_selector, micro_batches)
        self._router = []
        sums = super().forward_backward(micro_batches)
        return sums | self._router_metrics()

    def loss(self, micro: TrainingInputBatch, micro_batch: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
        """The policy loss with its weights for off-policy rows, the KL divergence to the reference, entropy."""
        algorithm = self.cfg.trainer.algorithm
        mask = micro.tensor("loss_mask").to(self.device)
        weights = micro.tensor("loss_weights").to(self.device)

        def masked(tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(mask != 0, tensor.to(self.device), 0.0)

        def column(name: str) -> torch.Tensor | None:
            return None if micro.get(name) is None else masked(micro.tensor(name))

        scores = self.token_scores(micro, with_entropy=True)
        assert scores.entropy is not None
        log_probs, entropy = masked(scores.log_probs), masked(scores.entropy)
        if scores.router is not None:
            self._router.append(_nothing_like(scores.router) if micro_batch.is_filler else scores.router)
        old_log_probs = column("action_log_probs")
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
            if not micro_batch.is_filler:
                self._old_log_probs[list(micro_batch.rows)] = old_log_probs.cpu()
        selected = {} if self._token_selector is None else {"selected_tokens": micro["selected_tokens"].to(self.device)}
        returned = self._loss_fn(
            log_probs, old_log_probs, column("advantages"), algorithm, mask, column("rollout_logprobs"), **selected
        )
        policy_loss, loss_metrics = checked_loss(returned, algorithm.policy_loss_type, log_probs.shape)
        off_policy_weights = column("off_policy_weights")
        parts = {"policy_loss": policy_loss if off_policy_weights is None else policy_loss * off_policy_weights}
        base_log_probs = column("base_action_log_probs")
        if algorithm.use_kl_loss and base_log_probs is not None:
            kl = compute_approx_kl(log_probs, base_log_probs, mask, algorithm.kl_estimator_type)
            parts["kl_loss"] = kl * algorithm.kl_loss_coef
            loss_metrics = {**loss_metrics, "policy_kl": kl}
        if algorithm.use_entropy_loss:
            parts["entropy_loss"] = -entropy * algorithm.entropy_loss_coef
        reduced = {name: weighted_sum(part, weights) for name, part in parts.items()}
        loss = torch.stack(list(reduced.values())).sum()
        sums = {f"loss/{name}": value.item() for name, value in {**reduced, "final_loss": loss}.items()}
        for name, value in {"policy_entropy": entropy, **loss_metrics}.items():
            sums[f"token/{name}"] = float(weighted_sum(value.detach(), mask))
        deviation = (importance_ratio(log_probs.detach(), old_log_probs) - 1).abs()
        sums["max/ratio_deviation"] = float(masked(deviation).max())
        return loss, sums | {"num_tokens": float(mask.sum())}

    def old_log_probs(self) -> TrainingOutputBatch:
        """What stood for `action_log_probs`, as `output` [b, R] of the staged rows; 0 outside the loss mask."""
        return TrainingOutputBatch(output=self._old_log_probs)

    @torch.no_grad()
    def _selected_tokens(self, selector: TokenSelector, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The tokens [b, R] bool of the staged rows that the loss treats apart, chosen over the rows of the mini-batch
        on all shards. A collective."""
        log_probs = self.forward(self._staged, micro_batches).tensor("output")
        rows = [row for micro_batch in micro_batches if not micro_batch.is_filler for row in micro_batch.rows]
        columns = [log_probs]
        for name in ("action_log_probs", "advantages", "loss_mask", "token_noise"):
            columns.append(log_probs if self._staged.get(name) is None else self._staged.tensor(name).float())
        own = torch.stack([column[rows] for column in columns], dim=1)  # [rows, 5, R]
        whole, start = self._rows_of_all_shards(own)
        now, old, advantages, mask, noise = whole.unbind(dim=1)
        chosen = selector(now, old, advantages, mask, noise, self.cfg.trainer.algorithm)
        selected = torch.zeros(log_probs.shape, dtype=torch.bool)
        selected[rows] = chosen[start : start + len(rows)].cpu()
        return selected

    def _rows_of_all_shards(self, own: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows [n, ...] of every shard, one shard after the other, and where this shard's begin. A collective."""
        ranks_per_shard = 1 if self.sequence_parallel is None else self.sequence_parallel.size
        of_ranks: list[torch.Tensor] = [torch.empty(0)] * self.world_size
        dist.all_gather_object(of_ranks, own)
        of_shards = of_ranks[::ranks_per_shard]
        before = of_shards[: self.rank // ranks_per_shard]
        return torch.cat(of_shards).to(self.device), sum(len(rows) for rows in before)

    def _router_metrics(self) -> MetricSums:
        """The load-balancing loss of a mixture of experts, over the tokens of the mini-batch: measured, not trained on.
        Shards' metrics add up, so the first alone reports it. A collective."""
        if not self._router:
            return {}
        value = auxiliary_loss(_over_ranks(reduce(add, self._router)))
        return {"loss/router_auxiliary_loss": value if self.rank == 0 else 0.0}

    # ---- weights on their way to the engines (in the order of `workers/weight_publisher.py`)

    def node(self) -> str:
        """The machine whose shared memory this rank sees (`EngineInfo.node`)."""
        return platform.node()

    def connect_engines(self, engines: EngineHandles, init_infos: Sequence[WeightSyncInitInfo]) -> None:
        """Rank 0 meets the engines, in place of those that it knew; the other ranks learn how weights will travel."""
        self._stages = needs_staging(init_infos[0])
        if self.rank == 0:
            if self._sender is not None:
                self._sender.close()
                self._sender = None
            self._sender = WeightSender(
                engines, init_infos, self.device, max_bucket_bytes=self._bucket_bytes, verification=self._verification
            )

    def stage_weights(self, version: int) -> None:
        """What can be done while engines still generate: files, deltas. A collective: parameters are gathered one by
        one."""
        if not self._stages:
            return
        if self._sender is not None:
            self._sender.stage(self._buckets(), version)
        else:
            self._take_part()

    def send_weights(self, version: int) -> dict[str, float]:
        """Brings the weights to every engine and compares fingerprints. A collective.

        Returns:
            on rank 0, the metrics of doing so.
        """
        if self._sender is not None:
            return self._sender.send(None if self._stages else self._buckets(), version).metrics
        if not self._stages:
            self._take_part()
        return {}

    def write_adapters(self, version: int) -> dict[str, int]:
        """Writes the adapters alone, for engines to load, and forgets older ones. A collective.

        Returns:
            on rank 0, the fingerprint of each of their tensors.
        """
        folder = expand_path(self.cfg.generator.weight_sync_directory) / "adapters"
        dtype: torch.dtype = getattr(torch, self.cfg.generator.model_dtype)
        written = write_adapter_version(self.transformer, folder, version, dtype, self.rank)
        return fingerprints_of(written.items(), version, self._verification)

    @torch.no_grad()
    def log_probs_of_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-prob (temperature 1) of each token but the first of prompts of one length. A collective."""
        sequences = torch.tensor(prompts, device=self.device)
        scores = self.model(sequences, torch.ones_like(sequences), sequences.shape[1] - 1, 1.0, with_entropy=False)
        return scores.log_probs.float().tolist()

    def teardown(self) -> None:
        """Close the sender, which holds memory that engines read."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    @property
    def _bucket_bytes(self) -> int:
        return int(self.cfg.generator.weight_transfer_threshold_cuda_ipc_GB * 1e9)

    @property
    def _verification(self) -> Literal["sampled", "full", "off"]:
        return self.cfg.generator.weight_sync_verification

    def _buckets(self) -> Iterator[Bucket]:
        dtype: torch.dtype = getattr(torch, self.cfg.generator.model_dtype)
        return buckets_of(self.whole_parameters(), dtype, self._bucket_bytes)

    def _take_part(self) -> None:
        """A rank that sends nothing takes part in the gathering of what rank 0 sends."""
        for _ in self._buckets():
            pass


def checked_loss(returned: Any, name: str, shape: torch.Size) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The loss of every token and its metrics, as a loss function must return them.

    Raises:
        ConfigError: it returned something else.
    """
    rule = f"trainer.algorithm.policy_loss_type='{name}' must return the loss of every token, {tuple(shape)}"
    match returned:
        case (torch.Tensor() as loss, Mapping() as metrics):
            pass
        case _:
            raise ConfigError(f"{rule}, and a dict of metrics; got {shape_of(returned)}")
    if loss.shape != shape:
        raise ConfigError(f"{rule}; got {shape_of(loss)}. The trainer reduces it (trainer.algorithm.loss_reduction)")
    for metric, values in metrics.items():
        if not isinstance(values, torch.Tensor) or values.shape not in (shape, torch.Size()):
            raise ConfigError(f"{rule}, and metrics that are tensors of this shape; '{metric}' is {shape_of(values)}")
    return loss, metrics


def _nothing_like(statistics: RouterStatistics) -> RouterStatistics:
    return RouterStatistics(torch.zeros_like(statistics.counts), torch.zeros_like(statistics.probability_sums), 0)


def _over_ranks(statistics: RouterStatistics) -> RouterStatistics:
    """The sum over all ranks. A collective."""
    sums = torch.stack([statistics.counts, statistics.probability_sums]).double()
    num_tokens = torch.tensor(statistics.num_tokens, device=sums.device)
    dist.all_reduce(sums)
    dist.all_reduce(num_tokens)
    return RouterStatistics(sums[0], sums[1], int(num_tokens))
