"""Parallel layout of a model: sizes of each kind of parallelism, positions of ranks, and rules for the sizes.

Imports neither torch nor megatron-core: layouts are rejected before any process starts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the kinds of parallelism of one model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Tensor parallelism within an expert."""

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one replica of the dense layers and share its rows."""
        return self.tensor * self.pipeline * self.context

    def get_group_rank(self, rank: int, world_size: int) -> int:
        """Return the process-group rank of a worker, given that workers of a replica are consecutive.

        megatron-core numbers ranks with pipeline stages outermost, the only order in which experts may be sharded
        differently from dense layers: rank = (stage x replicas + replica) x (tensor x context) + inner.
        """
        inner_size = self.tensor * self.context
        replica, place = divmod(rank, self.ranks_per_replica)
        stage, inner = divmod(place, inner_size)
        return (stage * (world_size // self.ranks_per_replica) + replica) * inner_size + inner


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that a layout must divide."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    """Rows of the dense feed-forward layers; 0: none."""

    num_experts: int = 0
    expert_intermediate_size: int = 0

    @staticmethod
    def from_config(config: object) -> "ModelSizes":
        """Read the sizes from a transformers config."""

        def read(name: str) -> int:
            return int(getattr(config, name, None) or 0)

        num_experts = read("num_experts") or read("num_local_experts")
        return ModelSizes(
            num_layers=read("num_hidden_layers"),
            num_heads=read("num_attention_heads"),
            num_key_value_heads=read("num_key_value_heads") or read("num_attention_heads"),
            intermediate_size=read("intermediate_size"),
            num_experts=num_experts,
            expert_intermediate_size=read("moe_intermediate_size") if num_experts else 0,
        )


def check_world(layout: ParallelSizes, world_size: int, section: str) -> None:
    """Check that a layout divides the model's ranks.

    Args:
        section: `trainer.<name>.megatron_config`.
    """
    sizes = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{section}.{name}={size} must be 1 or greater")
    product = layout.ranks_per_replica
    if world_size % product:
        raise ConfigError(
            f"{section}: tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size = "
            f"{layout.tensor} x {layout.pipeline} x {layout.context} must divide the model's {world_size} workers; "
            f"use {_describe_nearest_multiples(world_size, product)} workers, "
            "or another tensor_model_parallel_size, such as "
            f"{_format_list(_find_divisors_near(_count_remaining_workers(world_size, layout), layout.tensor))}"
        )
    product = layout.pipeline * layout.expert * layout.expert_tensor
    if world_size % product:
        fitting = world_size // layout.pipeline // layout.expert_tensor if layout.expert_tensor else 0
        raise ConfigError(
            f"{section}: pipeline_model_parallel_size x expert_model_parallel_size x expert_tensor_parallel_size = "
            f"{layout.pipeline} x {layout.expert} x {layout.expert_tensor} must divide the model's {world_size} "
            f"workers; use {_describe_nearest_multiples(world_size, product)} workers, or expert_model_parallel_size="
            f"{_format_list(_find_divisors_near(max(1, fitting), layout.expert))} "
            "(with expert_tensor_parallel_size=1, experts "
            "are not divided further)"
        )


def check_model(layout: ParallelSizes, model: ModelSizes, section: str, *, even_stages: bool = True) -> None:
    """Check that a layout divides a model.

    Args:
        even_stages: all pipeline stages have equally many layers.
    """
    # (setting, its size, the number to divide, its description)
    rules: list[tuple[str, int, int, str]] = [
        ("tensor_model_parallel_size", layout.tensor, model.num_heads, "attention heads"),
        ("tensor_model_parallel_size", layout.tensor, model.num_key_value_heads, "key-value heads"),
        ("tensor_model_parallel_size", layout.tensor, model.intermediate_size, "rows of a feed-forward layer"),
        ("pipeline_model_parallel_size", layout.pipeline, model.num_layers, "layers"),
    ]
    if model.num_experts:
        rules += [
            ("expert_model_parallel_size", layout.expert, model.num_experts, "experts"),
            (
                "expert_tensor_parallel_size",
                layout.expert_tensor,
                model.expert_intermediate_size,
                "rows of an expert",
            ),
        ]
        if layout.expert == 1 and layout.expert_tensor != layout.tensor:
            raise ConfigError(
                f"{section}.expert_tensor_parallel_size={layout.expert_tensor} must be "
                f"tensor_model_parallel_size={layout.tensor} (or null) where expert_model_parallel_size=1: "
                "megatron-core would not reduce the gradients of experts that tensor-parallel ranks replicate; or "
                "distribute experts over ranks with "
                f"expert_model_parallel_size={_format_list(_find_divisors_near(model.num_experts, layout.tensor))}"
            )
    elif layout.expert > 1:
        raise ConfigError(f"{section}.expert_model_parallel_size={layout.expert} must be 1: the model has no experts")
    if not even_stages:
        rules = [rule for rule in rules if rule[0] != "pipeline_model_parallel_size"]
    for name, size, number, title in rules:
        if number % size:
            fitting = _find_divisors_near(number, size)
            raise ConfigError(
                f"{section}.{name}={size} must divide the model's {number} {title}; use {_format_list(fitting)}"
            )


def compute_padded_vocabulary(num_words: int, tensor: int) -> int:
    """Return the number of embedding rows padded to a multiple of the tensor-parallel size."""
    return num_words + -num_words % tensor


def _find_divisors_near(number: int, size: int) -> list[int]:
    """Return the divisors of a number next to `size`, below and above it."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below = [each for each in divisors if each <= size][-1:]
    above = [each for each in divisors if each > size][:1]
    return below + above


def _describe_nearest_multiples(number: int, of: int) -> str:
    """Describe the multiples of `of` next to a number."""
    below = number // of * of
    return _format_list([each for each in (below, below + of) if each])


def _count_remaining_workers(world_size: int, layout: ParallelSizes) -> int:
    """Return the workers that pipeline and context parallelism leave to tensor parallelism; all if they do not divide
    them.
    """
    others = layout.pipeline * layout.context
    return world_size // others if world_size % others == 0 else world_size


def _format_list(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in numbers)
