"""Smallest change of settings with which a run fits: an ordered search over overrides of the command line."""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.config import apply_overrides
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.errors import SkyRLError
from skyrl_train.memory_plan.backends import Role
from skyrl_train.memory_plan.devices import Device
from skyrl_train.memory_plan.memory import MemoryPlan, estimate_memory, list_roles
from skyrl_train.memory_plan.model_shape import ModelShape

Overrides = Mapping[str, object]
_MOST_PLANS = 1_000
_MOST_TOGETHER = 4


def find_smallest_change(
    cfg: SkyRLConfig,
    shapes: Mapping[Role, ModelShape],
    device: Device,
    check: Callable[[Overrides], object],
    missing: Callable[[MemoryPlan], float] = operator.attrgetter("excess"),
) -> Overrides | None:
    """Return the fewest overrides with which a run fits, the cheapest first among as many; None if none were found.

    Args:
        check: raises SkyRLError for overrides that a run would refuse.
        missing: bytes that a plan needs too much.
    """
    moves = list(_iter_moves(cfg, shapes["policy"]))

    def missing_with(overrides: Overrides) -> float:
        return missing(estimate_memory(apply_overrides(cfg, overrides), shapes, device))

    for number in range(1, _MOST_TOGETHER + 1):
        for together in itertools.islice(itertools.combinations(moves, number), _MOST_PLANS):
            overrides: dict[str, object] = {}
            for move in together:
                overrides |= move
            if len(overrides) < sum(map(len, together)):  # two values of one setting
                continue
            if missing_with(overrides) == 0 and _is_accepted(overrides, check):
                for move in together:  # not all smaller sets were tried
                    rest = {name: value for name, value in overrides.items() if name not in move}
                    if missing_with(rest) == 0 and _is_accepted(rest, check):
                        overrides = rest
                return overrides
        if number == 1:  # several together: those that help alone
            now = missing_with({})
            moves = [move for move in moves if missing_with(move) < now]
    return None


def _is_accepted(overrides: Overrides, check: Callable[[Overrides], object]) -> bool:
    try:
        check(overrides)
    except SkyRLError:
        return False
    return True


def format_overrides(overrides: Overrides) -> str:
    """Return overrides as they are pasted to a command line."""
    words = {True: "true", False: "false", None: "null"}
    return " ".join(
        f"{name}={words[value] if isinstance(value, bool | None) else value}" for name, value in overrides.items()
    )


def _iter_moves(cfg: SkyRLConfig, shape: ModelShape) -> Iterator[Overrides]:
    """Yield single changes from the cheapest in time to the dearest."""
    trainer, generator = cfg.trainer, cfg.generator

    def setting(name: str) -> object:
        return operator.attrgetter(name)(cfg)

    def smaller(name: str, lowest: int) -> Iterator[Overrides]:
        value = setting(name)
        while isinstance(value, int) and value > lowest:
            value = max(lowest, value // 2)
            yield {name: value}

    trained = [role for role in list_roles(cfg) if role != "ref"]
    if trainer.max_tokens_per_microbatch is not None:
        yield from smaller("trainer.max_tokens_per_microbatch", generator.longest_context)
    else:
        yield from smaller("trainer.micro_forward_batch_size_per_gpu", 1)
        yield from smaller("trainer.micro_train_batch_size_per_gpu", 1)
    yield from smaller("trainer.logprobs_chunk_size", 256)
    for role in trained:
        if not setting(f"trainer.{role}.optimizer_config.offload_after_step"):
            yield {f"trainer.{role}.optimizer_config.offload_after_step": True}
    if not trainer.gradient_checkpointing:
        yield {"trainer.gradient_checkpointing": True}
    yield from _iter_engine_moves(cfg, shape)
    by_strategy = {"fsdp2": _iter_fsdp_moves, "deepspeed": _iter_deepspeed_moves, "megatron": _iter_megatron_moves}
    for role in list_roles(cfg):
        yield from by_strategy.get(trainer.strategy, _no_moves)(cfg, role, shape)
    nodes = trainer.placement.policy_num_nodes
    for factor in (2, 4, 8):
        more: dict[str, object] = {f"trainer.placement.{role}_num_nodes": nodes * factor for role in list_roles(cfg)}
        if trainer.placement.colocate_all:
            more["generator.num_inference_engines"] = generator.num_inference_engines * factor
        yield more


def _no_moves(cfg: SkyRLConfig, role: Role, shape: ModelShape) -> Sequence[Overrides]:
    return ()


def _iter_engine_moves(cfg: SkyRLConfig, shape: ModelShape) -> Iterator[Overrides]:
    generator = cfg.generator
    if not generator.run_engines_locally or not EngineRegistry.get_requirements(generator.backend).reserves_memory:
        return
    if shape.words and generator.max_num_seqs > 256:
        yield {"generator.max_num_seqs": 256}
    for value in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        if value != generator.gpu_memory_utilization:
            yield {"generator.gpu_memory_utilization": value}
    tensor, engines = generator.inference_engine_tensor_parallel_size, generator.num_inference_engines
    for factor in (2, 4, 8):
        if shape.num_heads % (tensor * factor) == 0 and engines % factor == 0:
            yield {
                "generator.inference_engine_tensor_parallel_size": tensor * factor,
                "generator.num_inference_engines": engines // factor,
            }


def _iter_fsdp_moves(cfg: SkyRLConfig, role: Role, shape: ModelShape) -> Iterator[Overrides]:
    section, settings = f"trainer.{role}", getattr(cfg.trainer, role)
    if settings.fsdp_config.reshard_after_forward is False:
        yield {f"{section}.fsdp_config.reshard_after_forward": True}
    if settings.fsdp_config.fsdp_size != -1:
        yield {f"{section}.fsdp_config.fsdp_size": -1}
    world = getattr(cfg.trainer.placement, f"{role}_world_size")
    size = settings.sequence_parallel_size * 2
    while world % size == 0 and shape.num_heads % size == 0 and size <= 8:
        yield {f"{section}.sequence_parallel_size": size}
        size *= 2
    if not settings.fsdp_config.cpu_offload and cfg.trainer.placement.device == "cuda":
        yield {f"{section}.fsdp_config.cpu_offload": True}


def _iter_deepspeed_moves(cfg: SkyRLConfig, role: Role, shape: ModelShape) -> Iterator[Overrides]:
    zero, section = getattr(cfg.trainer, role).deepspeed_config.zero_optimization, f"trainer.{role}.deepspeed_config"
    stages = (3,) if role == "ref" else range(zero.stage + 1, 4)
    yield from ({f"{section}.zero_optimization.stage": stage} for stage in stages if stage > zero.stage)
    on_gpu = cfg.trainer.placement.device == "cuda"
    if role != "ref" and on_gpu and zero.offload_optimizer.device == "none":
        yield {f"{section}.zero_optimization.offload_optimizer.device": "cpu"}
    if on_gpu and zero.offload_param.device == "none":
        yield {f"{section}.zero_optimization.offload_param.device": "cpu"}


def _iter_megatron_moves(cfg: SkyRLConfig, role: Role, shape: ModelShape) -> Iterator[Overrides]:
    section = f"trainer.{role}.megatron_config"
    settings, world = getattr(cfg.trainer, role).megatron_config, getattr(cfg.trainer.placement, f"{role}_world_size")
    tensor, stages, expert = (
        settings.tensor_model_parallel_size,
        settings.pipeline_model_parallel_size,
        settings.expert_model_parallel_size,
    )
    for factor in (2, 4, 8):
        if shape.experts and shape.num_experts % (expert * factor) == 0 and world % (stages * expert * factor) == 0:
            yield {
                f"{section}.expert_model_parallel_size": expert * factor,
                f"{section}.expert_tensor_parallel_size": 1,
            }
        if shape.num_key_value_heads % (tensor * factor) == 0 and world % (tensor * factor * stages) == 0:
            yield {f"{section}.tensor_model_parallel_size": tensor * factor}
        if shape.num_layers % (stages * factor) == 0 and world % (tensor * stages * factor) == 0:
            yield {f"{section}.pipeline_model_parallel_size": stages * factor}
