"""Recording and replay of the experts chosen by the routers of a mixture.

A router chooses by one call of `topk` over its experts. That call is intercepted and returns other experts, so that the
model computes their weights from its own scores (softmax before or after the choice, sigmoid, biases used only for the
choice), and gradients flow to the router through them.

Shapes: n tokens of a forward, L layers with a router, E experts, k chosen of them for each token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError
from skyrl_train.expert_routes import no_route, route_dtype
from skyrl_train.models.experts import find_routers

P = ParamSpec("P")
T = TypeVar("T")
Args = TypeVar("Args")
TorchFunction = Callable[..., object]

KEYWORD = "expert_routing"
"""Argument of a transformers model that passes a `RoutingPass` to its layers."""


class TopK(Protocol):
    """The part of `torch.return_types.topk` used here."""

    @property
    def indices(self) -> torch.Tensor: ...


class RoutingShape(NamedTuple):
    """Size of a mixture's routes."""

    num_layers: int
    num_chosen: int
    num_experts: int

    def check(self, routes: torch.Tensor) -> None:
        """Raise ValueError unless these are routes [..., L, k] of such a model."""
        expected = (self.num_layers, self.num_chosen)
        if tuple(routes.shape[-2:]) != expected or routes.dtype != route_dtype(self.num_experts):
            raise ValueError(
                f"expert routes must have {self.num_layers} layers and {self.num_chosen} experts of dtype "
                f"{route_dtype(self.num_experts)}, because the model has {self.num_experts}; got "
                f"{tuple(routes.shape[-2:])} of {routes.dtype}"
            )
        outside = (routes >= self.num_experts) & (routes != no_route(routes.dtype)) | (routes < 0)
        if outside.any():
            raise ValueError(
                f"expert routes must be from 0 to {self.num_experts - 1}; got {int(routes[outside][0])}; check that "
                "they come from this model"
            )


class RoutingPass:
    """Routing of one forward: replayed routes, and recorded routes.

    Not a dataclass: FSDP with mixed precision copies dataclasses among the arguments of a forward, and values written
    to a copy are lost.

    Args:
        replayed: [n, L, k]; at positions without a route the router chooses. None: no replay.
    """

    def __init__(self, replayed: torch.Tensor | None = None):
        self.replayed = replayed
        self.taken: dict[int, torch.Tensor] = {}
        """Layer -> [n, k] int64."""
        self.differing: dict[int, torch.Tensor] = {}
        """Layer -> [n] number of replayed experts that the router would not have chosen."""

    def get_routes(self) -> torch.Tensor:
        """Return the routes used, [n, L, k] int64."""
        return torch.stack([self.taken[layer] for layer in sorted(self.taken)], dim=1)


class RoutingReplay:
    """Replay of routes in a transformers model. A forward without a `RoutingPass` is unchanged.

    Args:
        model: with parameters or only their shapes (meta device); before it is sharded.
        setting: setting that requests replay, for errors.

    Raises:
        ConfigError: the model is not a mixture, or its routers choose in an unsupported way.
    """

    def __init__(self, model: nn.Module, setting: str):
        routers = [router for router, _ in find_routers(model)]
        name = type(model).__name__
        if not routers:
            raise ConfigError(f"{setting} needs a mixture of experts, and {name} has no router; remove it")
        shapes = {_measure_shape(router, model) for router in routers}
        layers = {parent for router in routers if (parent := _find_layer_of(router, model)) is not None}
        if len(shapes) != 1 or None in shapes or not layers:
            raise ConfigError(f"{setting}: the routing of {name} is not supported; remove it")
        [found] = shapes
        assert found is not None
        self.shape = RoutingShape(len(routers), found.num_chosen, found.num_experts)
        # The pass of the current layer. A layer passes it on by its keyword arguments, so that a backward that
        # recomputes the layer (gradient checkpointing) replays the same routes as its forward.
        self._active: RoutingPass | None = None
        kinds = tuple({type(layer) for layer in layers})
        for module in model.modules():
            if isinstance(module, kinds):
                module.register_forward_pre_hook(self._on_enter_layer, with_kwargs=True)
                module.register_forward_hook(self._on_leave_layer, always_call=True)
        for number, router in enumerate(routers):
            router.forward = self._wrap_forward(number, router.forward)

    def _on_enter_layer(self, _module: nn.Module, args: Args, kwargs: dict[str, Any]) -> tuple[Args, dict[str, Any]]:
        # Removed from the arguments: attention functions need not know it.
        self._active = kwargs.get(KEYWORD)
        return args, {name: value for name, value in kwargs.items() if name != KEYWORD}

    def _on_leave_layer(self, *_: object) -> None:
        self._active = None

    def _wrap_forward(self, layer: int, forward: Callable[P, T]) -> Callable[P, T]:
        def run_routed(*args: P.args, **kwargs: P.kwargs) -> T:
            routing = self._active
            if routing is None:
                return forward(*args, **kwargs)
            with RouterChoice(routing, layer, self.shape):
                return forward(*args, **kwargs)

        return run_routed


class RouterChoice(TorchFunctionMode):
    """Override of one router's choice of experts by the recorded routes of a pass. Records the experts used.

    Args:
        layer: index of the router in the model.
    """

    def __init__(self, routing: RoutingPass, layer: int, shape: RoutingShape):
        super().__init__()
        self._routing, self._layer, self._shape = routing, layer, shape

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        scores = _get_choice_scores(func, args, kwargs or {})
        if scores is None or _get_choice_size(scores, cast(TopK, result)) != self._shape[1:]:
            return result
        routing, chosen = self._routing, cast(TopK, result).indices
        is_first = self._layer not in routing.taken  # except where a backward recomputes the layer
        if routing.replayed is not None:
            replayed = routing.replayed[:, self._layer]
            is_known = replayed != no_route(replayed.dtype)
            replayed = torch.where(is_known, replayed.long(), chosen)
            if is_first:
                own = (replayed[:, :, None] == chosen[:, None, :]).any(dim=-1)
                routing.differing[self._layer] = (~own).sum(dim=-1)
            chosen = replayed
            # Differentiable like topk itself: the gradient flows to the scores of the experts used.
            result = torch.return_types.topk((scores.gather(-1, chosen), chosen))  # type: ignore[attr-defined]
        if is_first:
            routing.taken[self._layer] = chosen
        return result


class _ChoiceFinder(TorchFunctionMode):
    """Recorder of the sizes (k, E) of all possible router choices in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        scores = _get_choice_scores(func, args, kwargs or {})
        if scores is not None:
            self.found.append(_get_choice_size(scores, cast(TopK, result)))
        return result


def _get_choice_scores(func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the scores [n, E] of a call of `topk` over the last of two dimensions; None for any other call."""
    if func not in (torch.topk, torch.Tensor.topk):
        return None
    scores = args[0] if args else kwargs["input"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return scores if scores.dim() == 2 and dim in (-1, 1) else None


def _get_choice_size(scores: torch.Tensor, result: TopK) -> tuple[int, int]:
    return result.indices.shape[-1], scores.shape[-1]


def _measure_shape(router: nn.Module, model: Any) -> RoutingShape | None:
    """Run a router on two tokens and return k and E of its choice, or None if it is not found. A choice among expert
    groups may precede it: the choice of experts has as many scores as the router has logits."""
    like = next(router.parameters(), None)
    if like is None:
        return None
    hidden = torch.zeros(2, model.config.get_text_config().hidden_size, dtype=like.dtype, device=like.device)
    index = next(index for each, index in find_routers(model) if each is router)
    with torch.no_grad(), _ChoiceFinder() as finder:
        try:
            output = router(hidden)
        except Exception:  # any error of a router that runs without the rest of its layer
            return None
    logits = output[index] if isinstance(output, tuple) else output
    found = [size for size in finder.found if size[1] == logits.shape[-1]]
    return RoutingShape(1, *found[-1]) if found else None


def _find_layer_of(router: nn.Module, model: nn.Module) -> nn.Module | None:
    """Return the decoder layer that holds a router."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and any(each is router for each in module.modules()):
            return module
    return None
