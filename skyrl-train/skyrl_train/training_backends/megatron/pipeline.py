"""Execution of micro-batches through the pipeline stages of a model, forward and backward, with megatron-core's
schedules.

Shapes: b rows, R response columns, n tokens of a micro-batch, H hidden size; N tokens of this rank under sequence
parallelism.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from skyrl_train.expert_routes import no_route, route_dtype
from skyrl_train.models.packing import Layout, pack_rows
from skyrl_train.models.routing_replay import RoutingPass
from skyrl_train.training_backends.base import MetricScalars, Objective, Scores
from skyrl_train.training_backends.megatron.groups import get_stage_group, select_rank_slice
from skyrl_train.training_backends.megatron.layers import RowsInfo
from skyrl_train.training_backends.megatron.model import HiddenStatesModel
from skyrl_train.training_backends.megatron.routers import StageRouters, gather_routes
from skyrl_train.training_backends.megatron.vocabulary_parallel import VocabularyShard, compute_token_log_probs
from skyrl_train.training_batch import TrainingInputBatch

Part = tuple[TrainingInputBatch, bool]
"""A micro-batch, and whether routers count its tokens."""


@dataclass(frozen=True)
class Scored:
    """Result of a micro-batch, on the last stage."""

    scores: Scores
    sums: MetricScalars


class Pipeline:
    """Execution of micro-batches over the pipeline stages of one replica.

    Args:
        model: this rank's stage, wrapped for the reduction of gradients if it is trained.
        rotary: computes cosines and sines from positions, as in the transformers model.
        words: vocabulary shard of this rank.
        routers: hooks on the routers of a mixture of experts, or None.
        chunk_size: tokens per chunk of logits.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: HiddenStatesModel,
        rotary: nn.Module,
        words: VocabularyShard,
        *,
        routers: StageRouters | None,
        chunk_size: int,
        device: torch.device,
    ):
        self.routers = routers
        self.model, self.stage, self.rotary, self.words = model, stage, rotary, words
        self.config: TransformerConfig = stage.config
        self.chunk_size = chunk_size
        self.device = device

    @torch.no_grad()
    def forward(
        self, micro_batches: Iterable[TrainingInputBatch], temperature: float, *, record_routes: bool = False
    ) -> list[Scores]:
        """Score micro-batches. Returns: their scores on the CPU, on every stage. A collective."""
        recorded: list[tuple[Layout, RoutingPass]] = []
        step = partial(
            self._forward_step,
            temperature=temperature,
            objective=None,
            factor=1.0,
            recorded=recorded if record_routes else None,
        )
        parts = [(micro, False) for micro in micro_batches]
        found = self._run(step, parts, forward_only=True)
        outputs = from_last_stage([scored.scores.output.cpu() for scored in found])
        routes = self._collect_routes(recorded, parts) if record_routes else [None] * len(parts)
        return [Scores(output, routes=each) for output, each in zip(outputs, routes, strict=True)]

    def _collect_routes(
        self, recorded: Sequence[tuple[Layout, RoutingPass]], parts: Sequence[Part]
    ) -> list[torch.Tensor]:
        """Return the routes of each micro-batch, [b, T, L, k]. A collective."""
        assert self.routers is not None, "a model without experts is refused before"
        kind = route_dtype(self.routers.shape.num_experts)
        layouts, passes = zip(*recorded, strict=True)
        return [
            layout.scatter_to_batch(routes.to(self.device), micro.tensor("sequences").shape[1], no_route(kind)).to(kind)
            for layout, routes, (micro, _) in zip(layouts, gather_routes(passes), parts, strict=True)
        ]

    def forward_backward(
        self,
        micro_batches: Sequence[Part],
        temperature: float,
        objective: Objective,
        num_replicas: int,
    ) -> list[Scored]:
        """Accumulate the gradient of micro-batches whose losses add up to this replica's part of the mini-batch loss.

        Args:
            micro_batches: (micro-batch, whether to count its expert load) pairs.
            num_replicas: data-parallel ranks, over which gradients are averaged.
        """
        # The schedule divides each loss by the number of micro-batches, the reduction by the number of replicas, but
        # the gradient of the mini-batch is a sum over both.
        factor = float(len(micro_batches) * num_replicas)
        step = partial(self._forward_step, temperature=temperature, objective=objective, factor=factor)
        return self._run(step, micro_batches, forward_only=False)

    def _run(self, step: Any, micro_batches: Sequence[Part], *, forward_only: bool) -> list[Scored]:
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=self.config.tensor_model_parallel_size,  # stages announce the shapes that they send
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_step(
        self,
        micro_batches: Iterator[Part],
        model: nn.Module,
        *,
        temperature: float,
        objective: Objective | None,
        factor: float,
        recorded: list[tuple[Layout, RoutingPass]] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        micro, is_counted = next(micro_batches)
        layout = self._build_layout(micro)
        routing = RoutingPass() if recorded is not None else self._get_replayed_routes(micro, layout)
        if recorded is not None and routing is not None:
            recorded.append((layout, routing))
        with nullcontext() if self.routers is None or not is_counted else self.routers.collect(layout.real):
            hidden = self.run_stage(model, layout, routing)
        return hidden, partial(
            self._compute_loss, layout=layout, micro=micro, temperature=temperature, objective=objective, factor=factor
        )

    def _build_layout(self, micro: TrainingInputBatch) -> Layout:
        """Pack the rows, to a number of tokens that the tensor-parallel ranks divide."""
        layout = pack_rows(
            micro.tensor("sequences"),
            micro.tensor("attention_mask"),
            micro.metadata["response_length"],
            multiple_of=self.config.tensor_model_parallel_size,
        )
        return layout.to(self.device)

    def _get_replayed_routes(self, micro: TrainingInputBatch, layout: Layout) -> RoutingPass | None:
        """Return the replayed routes of a micro-batch for this rank's tokens, or None."""
        routes = micro.get("expert_routes")
        if routes is None:
            return None
        assert self.routers is not None, "a model without experts is refused before"
        self.routers.shape.check(routes)
        return RoutingPass(select_rank_slice(layout.gather_from_batch(routes.to(self.device), no_route(routes.dtype))))

    def run_stage(self, model: nn.Module, layout: Layout, routing: RoutingPass | None = None) -> torch.Tensor:
        """Compute the layers of this stage: hidden states [N, 1, H]."""
        like = torch.empty(0, dtype=self.config.params_dtype, device=self.device)
        cos, sin = self.rotary(like, layout.position_ids)
        info = RowsInfo(qkv_format="thd", rows=layout.rows, cos=cos, sin=sin, routing=routing)
        return model(layout.input_ids, layout.position_ids, None, packed_seq_params=info)

    def _compute_loss(
        self,
        hidden: torch.Tensor,
        layout: Layout,
        micro: TrainingInputBatch,
        temperature: float,
        objective: Objective | None,
        factor: float,
        non_loss_data: bool = False,
    ) -> Any:
        """Score the hidden states of the last stage, and compute the loss if there is an objective."""
        with_entropy = objective is not None and objective.needs_entropy
        scores = self.compute_scores(hidden, layout, temperature, with_entropy=with_entropy)
        if objective is None or non_loss_data:
            return Scored(scores, {})
        loss, sums = objective(scores, micro.to(self.device))
        entropy = None if scores.entropy is None else scores.entropy.detach()
        return loss * factor, Scored(Scores(scores.output.detach(), entropy), sums)

    def score(self, micro: TrainingInputBatch, temperature: float, *, with_entropy: bool) -> Scores:
        """Score a micro-batch if there is only one stage; gradients flow if enabled."""
        layout = self._build_layout(micro)
        self.stage.set_input_tensor(None)  # type: ignore[arg-type]
        hidden = self.run_stage(self.model, layout, self._get_replayed_routes(micro, layout))
        return self.compute_scores(hidden, layout, temperature, with_entropy=with_entropy)

    def compute_scores(self, hidden: torch.Tensor, layout: Layout, temperature: float, *, with_entropy: bool) -> Scores:
        """Compute log-probs or values of the response tokens, [b, R], from the hidden states of the last stage."""
        if self.stage.value_head is not None:
            return Scores(self._compute_values(hidden, layout, self.stage.value_head))
        # Each rank computes the logits of its vocabulary shard from the states of all tokens: partial gradients of
        # these states are summed over ranks in the backward of either function.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        states, labels = layout.select_scored(hidden.transpose(0, 1))
        log_probs, entropy = compute_token_log_probs(
            states,
            self.stage.get_output_weight(),
            labels,
            self.words,
            temperature=temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
        )
        return Scores(layout.scatter_scored(log_probs), None if entropy is None else layout.scatter_scored(entropy))

    def _compute_values(self, hidden: torch.Tensor, layout: Layout, head: nn.Linear) -> torch.Tensor:
        # Each rank computes all values and the same loss: it keeps its own slice of the gradient of all states, because
        # a sum over ranks would count it once per rank.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states, _ = layout.select_scored(hidden.transpose(0, 1))
        return layout.scatter_scored(states.float() @ head.weight[0].float())


def from_last_stage(value: Any) -> Any:
    """Return the last stage's value on every stage. A collective of the stages of a replica."""
    group = get_stage_group()
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return values[0]
