"""Load statistics of the routers of a mixture of experts, as sums over micro-batches and ranks.

For logging only; not used in any loss. Shapes: L layers with a router, E experts, n tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class RouterStatistics:
    """Sums over non-padding tokens."""

    counts: torch.Tensor
    """[L, E]: how often each expert was chosen."""

    probability_sums: torch.Tensor
    """[L, E]: sum of the router's softmax probabilities."""

    num_tokens: int

    num_differing: float = 0.0
    """Number of replayed choices that differ from the router's, over all layers."""

    def __add__(self, other: "RouterStatistics") -> "RouterStatistics":
        return RouterStatistics(
            self.counts + other.counts,
            self.probability_sums + other.probability_sums,
            self.num_tokens + other.num_tokens,
            self.num_differing + other.num_differing,
        )

    def build_zeros(self) -> "RouterStatistics":
        """Return zero statistics with the same layers and experts."""
        return RouterStatistics(torch.zeros_like(self.counts), torch.zeros_like(self.probability_sums), 0)


def compute_auxiliary_loss(statistics: RouterStatistics) -> float:
    """Compute the load-balancing loss of Switch Transformers (https://arxiv.org/abs/2101.03961, eq. 4-6) over the
    tokens of all layers, as in transformers for Mixtral and Qwen:

        E sum_e f_e P_e,    f_e = counts_e / (L n),    P_e = probability_sums_e / (L n)

    It equals the number of experts per token for a uniform load (f sums up to that number), and E times that at worst.
    """
    num_layers, num_experts = statistics.counts.shape
    # Layers are averaged, not added, so that models of different depth can be compared.
    total = max(1, num_layers * statistics.num_tokens)
    # float64: counts of a whole step may exceed 2^24, above which float32 is not exact.
    counts, probabilities = statistics.counts.double().sum(dim=0), statistics.probability_sums.double().sum(dim=0)
    return float(num_experts * (counts / total * (probabilities / total)).sum())


class RouterChoices(Protocol):
    """Router choices of one forward (`routing_replay.RoutingPass`)."""

    taken: dict[int, torch.Tensor]
    differing: dict[int, torch.Tensor]


@dataclass
class _Collected:
    real: torch.Tensor
    num_chosen: int
    routing: "RouterChoices | None" = None
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def build_statistics(self) -> RouterStatistics:
        counts, sums = zip(*(self.layers[layer] for layer in sorted(self.layers)), strict=True)
        differing = {} if self.routing is None else self.routing.differing
        num_differing = float(sum(each[self.real].sum() for each in differing.values()))
        return RouterStatistics(torch.stack(counts), torch.stack(sums), int(self.real.sum()), num_differing)


class Routers:
    """Statistics of a model's routers. Free for a model without routers.

    Args:
        model: a transformers model. Its routers are the modules that transformers itself would record.
    """

    def __init__(self, model: nn.Module):
        self._collected: _Collected | None = None
        self.modules = list(find_routers(model))
        config = getattr(model, "config", None)
        self._num_chosen = int(getattr(config and config.get_text_config(), "num_experts_per_tok", None) or 1)
        for layer, (router, index) in enumerate(self.modules):
            router.register_forward_hook(self._build_hook(layer, index))

    def __bool__(self) -> bool:
        return bool(self.modules)

    @contextmanager
    def collect(self, real: torch.Tensor, routing: RouterChoices | None = None) -> Iterator[_Collected]:
        """Collect statistics of the enclosed forward. A backward that recomputes layers later is not counted.

        Args:
            real: [n] bool, 0 on padding.
            routing: routing of this forward, if replayed or recorded: the experts actually used are then counted.
        """
        self._collected = _Collected(real, self._num_chosen, routing)
        try:
            yield self._collected
        finally:
            self._collected = None

    def _build_hook(self, layer: int, index: int) -> Any:
        @torch.no_grad()
        def on_forward(module: nn.Module, args: Any, output: Any) -> None:
            # A backward with gradient checkpointing runs the layer again, outside of `collect`: it must not be counted
            # twice.
            if self._collected is None:
                return
            logits = output[index] if isinstance(output, tuple) else output
            # always float32: a softmax over hundreds of experts in bfloat16 does not sum to 1
            probabilities = logits.detach().float().flatten(0, -2).softmax(dim=-1)[self._collected.real]
            taken = None if self._collected.routing is None else self._collected.routing.taken.get(layer)
            if taken is None:
                chosen = probabilities.topk(self._collected.num_chosen, dim=-1).indices
            else:
                chosen = taken[self._collected.real]
            # minlength keeps the columns of unused experts, because sums of ranks are added
            counts = torch.bincount(chosen.flatten(), minlength=probabilities.shape[-1]).float()
            self._collected.layers[layer] = counts, probabilities.sum(dim=0)

        return on_forward


def find_routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield router modules in the order of layers, with the index of the logits in their outputs."""
    for part in model.modules():
        recorders = getattr(part, "_can_record_outputs", None)
        recorder = (recorders or {}).get("router_logits")
        if recorder is None:
            continue
        kind = getattr(recorder, "target_class", recorder)
        for module in part.modules():
            if isinstance(module, kind):
                yield module, getattr(recorder, "index", 0)
        return
