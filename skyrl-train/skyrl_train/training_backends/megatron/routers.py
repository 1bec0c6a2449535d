"""Routers of a pipeline stage: load statistics, as parts whose sum over all ranks is the model's, and replay and
recording of the chosen experts.

Shapes: L layers with a router (of all stages), E experts, k chosen of them for each token; N tokens of a micro-batch, n
tokens of this rank (under sequence parallelism a slice of N).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from skyrl_train.models.experts import RouterStatistics
from skyrl_train.models.routing_replay import RouterChoice, RoutingPass, RoutingShape
from skyrl_train.training_backends.megatron.groups import get_stage_group, get_tensor_group, select_rank_slice


class StageRouters:
    """Routers of a stage: records their choices, or replaces them by the choices of a `RoutingPass`.

    Args:
        stage: the layers; those without experts have no router.
        sparse_layers: numbers of the model's layers with experts, in order.
        first_layer: number of the stage's first layer.
    """

    def __init__(
        self, stage: nn.Module, sparse_layers: Sequence[int], first_layer: int, num_chosen: int, num_experts: int
    ):
        self.shape = RoutingShape(len(sparse_layers), num_chosen, num_experts)
        self._real: torch.Tensor | None = None
        # The pass of the current layer, taken from the layer's arguments, so that a backward that recomputes the layer,
        # while other micro-batches are in progress, replays the same routes as its forward.
        self._routing: RoutingPass | None = None
        nothing = torch.zeros(len(sparse_layers), num_experts)
        self._zeros = RouterStatistics(nothing, nothing.clone(), 0)
        self._total = self._zeros
        places = iter(place for place, layer in enumerate(sparse_layers) if layer >= first_layer)
        for module in stage.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(self._on_enter_layer, with_kwargs=True)
                module.register_forward_hook(self._on_leave_layer, always_call=True)
            if isinstance(module, Router):
                self._wrap_router(module, next(places))

    def _on_enter_layer(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._routing = kwargs["packed_seq_params"].routing

    def _on_leave_layer(self, *_: Any) -> None:
        self._routing = None

    def _wrap_router(self, router: Any, place: int) -> None:
        choose = router.routing

        def run_routed(logits: torch.Tensor, **options: Any) -> Any:
            routing = self._routing
            with nullcontext() if routing is None else RouterChoice(routing, place, self.shape):
                chosen = choose(logits, **options)
            # The backward recomputes layers, outside of `collect`: they must not be counted twice.
            if self._real is not None:
                self._total += self._compute_statistics(logits.detach(), place, routing)
            return chosen

        router.routing = run_routed

    @torch.no_grad()
    def _compute_statistics(self, logits: torch.Tensor, place: int, routing: RoutingPass | None) -> RouterStatistics:
        assert self._real is not None
        probabilities = logits.float().flatten(0, -2).softmax(dim=-1)[self._real]
        found, num_differing = self._zeros.build_zeros(), 0.0
        if routing is None:
            chosen = probabilities.topk(self.shape.num_chosen, dim=-1).indices
        else:
            chosen = routing.taken[place][self._real]
            if place in routing.differing:
                num_differing = float(routing.differing[place][self._real].sum())
        found.counts[place] = torch.bincount(chosen.flatten(), minlength=probabilities.shape[-1]).float().cpu()
        found.probability_sums[place] = probabilities.sum(dim=0).cpu()
        return replace(found, num_differing=num_differing)

    @contextmanager
    def collect(self, real: torch.Tensor) -> Iterator[None]:
        """Count the tokens of the enclosed forward.

        Args:
            real: [N] bool, 0 on padding.
        """
        self._real = select_rank_slice(real)
        try:
            yield
        finally:
            # Every stage has seen the tokens: only one counts them.
            if get_stage_group().rank() == 0:
                self._total += replace(self._zeros, num_tokens=int(self._real.sum()))
            self._real = None

    def reset_statistics(self) -> RouterStatistics:
        """Return the sums since the last call, and reset them."""
        total, self._total = self._total, self._zeros
        return total


def gather_routes(passes: Sequence[RoutingPass]) -> list[torch.Tensor]:
    """Return the routes of each pass, [N, L, k] int64 on the CPU, on every rank of the replica. A collective."""
    # Once for all micro-batches, after the schedule: during it, stages wait for each other's activations.
    own = [{layer: taken.cpu() for layer, taken in each.taken.items()} for each in passes]
    slices = _gather_all(own, get_tensor_group())
    of_stage = [
        {layer: torch.cat([ranks[number][layer] for ranks in slices]) for layer in each}
        for number, each in enumerate(own)
    ]
    stages = _gather_all(of_stage, get_stage_group())
    routes = []
    for parts in zip(*stages, strict=True):
        layers = {layer: taken for part in parts for layer, taken in part.items()}
        routes.append(torch.stack([layers[layer] for layer in sorted(layers)], dim=1))
    return routes


def _gather_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    if group.size() == 1:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
