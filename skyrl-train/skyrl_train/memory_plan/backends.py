"""Division of a model's memory over its ranks, under each training backend: bytes of one rank.

N parameters, M trained, B in the largest layer, R outside of layers; e bytes per number of the computation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_train.config import RefConfig, SkyRLConfig
from skyrl_train.memory_plan.model_shape import ModelShape

Role = Literal["policy", "critic", "ref"]
Kind = Literal["cpu", "cuda"]

_DEEPSPEED_BUCKET = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`, in numbers (deepspeed/runtime/zero/config.py)."""

_DEEPSPEED_LIVE = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters`, and of the distance of uses below which stage 3 keeps them."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Bytes of a model on one rank, and how its computation is divided."""

    weights: int
    """At rest. Float32 copies of bfloat16 weights belong to `optimizer`."""

    gradients: int = 0
    optimizer: int = 0
    """AdamW's running mean and variance, and the weights that it steps on where these are others."""

    host: frozenset[str] = frozenset()
    """Of `weights`, `gradients`, `optimizer`: those in host memory."""

    gathered_first: int = 0
    """Weights of other ranks as a forward begins."""

    gathered_head: int = 0
    """While log-probs are computed from the last layer."""

    gathered: int = 0
    """While a layer is computed."""

    layer_gradients: int = 0
    """Gradients of a layer before their reduction."""

    layer_reduction: int = 0
    """Buffers of that reduction."""

    layer_buffer: int = 0
    """What the reduction of the layer before still holds while a layer is computed backward."""

    copies_reduced: int = 0
    """Reduced gradients that are kept in addition to the accumulated ones, until the backward ends."""

    head_gradient: int = 0
    """Gradient of the output layer, from its computation to the end of the backward."""

    final_reduction: int = 0
    """Gradients and buffers as a backward ends."""

    step: int = 0
    """Working memory of the optimizer step."""

    number: int
    """Bytes of a number that layers compute with."""

    stream: int
    """Bytes of a number that passes from layer to layer."""

    tokens_by: int = 1
    """Ranks that divide the tokens of a micro-batch."""

    words_by: int = 1
    """Ranks that divide the vocabulary."""

    layers: int
    """Layers of this rank."""

    keeps_gradients: bool = False
    """Gradients have their memory between steps too."""

    in_flight: int = 1
    """Micro-batches whose activations are held at a time."""

    @property
    def resting(self) -> int:
        """Bytes between the phases, on device and host."""
        return self.weights + self.gradients + self.optimizer


def fsdp2(cfg: SkyRLConfig, role: Role, shape: ModelShape, kind: Kind) -> Division:
    """Divide by `fully_shard`: float32 shards (with `bf16`, bfloat16 shards of frozen parameters); a layer is gathered
    into a buffer and copied to its tensors, the next one is gathered meanwhile; gradients are reduced in float32 from a
    buffer (torch/distributed/fsdp/_fully_shard).
    """
    settings = getattr(cfg.trainer, role)
    fsdp, world = settings.fsdp_config, getattr(cfg.trainer.placement, f"{role}_world_size")
    shards = world if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    number = 2 if cfg.trainer.bf16 else 4
    is_frozen = shape.has_adapters or isinstance(settings, RefConfig)
    resting = (number if is_frozen else 4) * shape.parameters + (4 * shape.trained if shape.has_adapters else 0)
    layer, outside = number * shape.layer, number * shape.outside
    buffer = 1 if shards > 1 else 0  # one rank copies its weights without a buffer
    keeps = fsdp.reshard_after_forward is False
    gathered = number * shape.parameters + buffer * layer if keeps else outside + (1 + buffer) * layer
    common: dict[str, Any] = dict(
        weights=resting // shards,
        gathered_first=gathered if keeps else (1 + buffer) * outside + layer,
        gathered_head=gathered if keeps else outside + buffer * layer,
        gathered=gathered,
        number=number,
        stream=number,
        tokens_by=settings.sequence_parallel_size,
        layers=shape.num_layers,
    )
    offloaded = frozenset({"weights", "gradients", "optimizer"} if fsdp.cpu_offload and kind == "cuda" else ())
    if isinstance(settings, RefConfig):
        return Division(host=offloaded & {"weights"}, **common)
    trained = shape.trained // shards
    # The part of a layer's and of the outer parameters that train.
    share = shape.trained / shape.parameters
    of_layer = int(shape.layer * share)
    of_outside = 0 if shape.has_adapters else shape.outside
    head = 0 if shape.has_adapters else shape.words * shape.hidden
    return Division(
        gradients=4 * trained,
        optimizer=8 * trained,
        host=offloaded,
        layer_gradients=number * of_layer,
        layer_reduction=4 * of_layer + 4 * of_layer // shards,
        layer_buffer=4 * of_layer,
        # Each layer keeps what it summed over copies of the model (`_all_reduce_state`).
        copies_reduced=4 * (shape.trained - of_outside) // shards if shards < world else 0,
        head_gradient=number * head,
        final_reduction=(number + 4) * of_outside + 4 * of_outside // shards,
        step=_estimate_adam_step(shape, trained, shards, kind, offloaded=bool(offloaded)),
        **common,
    )


def _estimate_adam_step(shape: ModelShape, trained: int, shards: int, kind: Kind, *, offloaded: bool) -> int:
    """Working memory of torch's AdamW: on CUDA the roots of all variances at once (`foreach`), on a CPU two tensors of
    the size of one parameter."""
    if kind == "cuda" and not offloaded:
        return 4 * trained
    largest = max(shape.words * shape.hidden, shape.experts // max(1, shape.num_layers) // 3 * 2)
    return 0 if shape.has_adapters or offloaded else 8 * largest // shards


def deepspeed(cfg: SkyRLConfig, role: Role, shape: ModelShape, kind: Kind) -> Division:
    """Divide by ZeRO: optimizer state (stage 1), gradients (2), weights (3)."""
    settings = getattr(cfg.trainer, role)
    zero, ranks = settings.deepspeed_config.zero_optimization, getattr(cfg.trainer.placement, f"{role}_world_size")
    stage, bf16 = zero.stage, cfg.trainer.bf16
    is_cast = bf16 and settings.deepspeed_config.torch_autocast.enabled
    held = 2 if bf16 and not is_cast else 4
    adapters = shape.trained if shape.has_adapters else 0
    resting = shape.parameters + adapters
    # Autocast keeps a bfloat16 copy of each weight that it has met until the forward ends.
    casts = 2 * shape.parameters if is_cast else 0
    gathered = casts + (held * min(resting, _DEEPSPEED_LIVE) if stage == 3 else 0)
    common: dict[str, Any] = dict(
        weights=held * resting // (ranks if stage == 3 else 1),
        gathered_first=gathered,
        gathered_head=gathered,
        gathered=gathered,
        number=2 if bf16 else 4,
        stream=held,
        tokens_by=settings.sequence_parallel_size,
        layers=shape.num_layers,
    )
    on_host = {"weights"} if stage == 3 and zero.offload_param.device == "cpu" and kind == "cuda" else set()
    if isinstance(settings, RefConfig):
        return Division(host=frozenset(on_host), **common)
    offloads = stage > 0 and zero.offload_optimizer.device == "cpu"
    if offloads and kind == "cuda":
        on_host |= {"optimizer", "gradients"} if stage > 1 else {"optimizer"}
    part = shape.trained // (ranks if stage else 1)
    size = zero.reduce_bucket_size
    bucket = _DEEPSPEED_BUCKET if size == "auto" else int(size)
    bucket = held * (bucket if kind == "cuda" and stage else min(bucket, shape.trained))
    masters = 4 * part if stage or held == 2 else 0
    gradients = held * (shape.trained if stage < 2 else part)
    if offloads and stage < 3:
        # In host memory also the float32 gradients, sums of micro-batches, and the rounded weights on their way back;
        # and a gradient of the largest parameter on either side (`temp_grad_buffer_for_*_offload`).
        gradients += 4 * part
        masters += held * part + 8 * shape.words * shape.hidden
    # Several ranks reduce a flat copy of the bucket.
    copy = bucket if ranks > 1 and stage else 0
    # Stage 1 keeps whole gradients in its bucket, and as it steps those of its part alone.
    in_bucket = gradients if stage == 1 else 0
    # Without a fused kernel AdamW needs two tensors of the size of the one that holds all weights of the rank.
    fused = kind == "cuda" or offloads
    working = 0 if fused else 8 * part if stage else _estimate_adam_step(shape, part, 1, kind, offloaded=False)
    return Division(
        gradients=gradients,
        keeps_gradients=True,
        optimizer=8 * part + masters,
        host=frozenset(on_host),
        layer_gradients=held * int(shape.layer * shape.trained / shape.parameters),
        layer_reduction=max(0, bucket - in_bucket) + copy if stage else 0,
        head_gradient=held * (0 if shape.has_adapters else shape.words * shape.hidden),
        final_reduction=max(0, bucket - in_bucket) + copy,
        step=working
        + (4 * part if stage and not offloads else 0)
        - (held * (shape.trained - part) if in_bucket else 0),
        **common,
    )


def megatron(cfg: SkyRLConfig, role: Role, shape: ModelShape, kind: Kind) -> Division:
    """Divide by megatron-core: layers over tensor and pipeline ranks, experts over expert ranks, AdamW's state over
    data-parallel ranks (distributed optimizer). Weights and gradients are whole on each data-parallel rank."""
    settings = getattr(cfg.trainer, role)
    section, world = settings.megatron_config, getattr(cfg.trainer.placement, f"{role}_world_size")
    tensor, stages = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    expert = section.expert_model_parallel_size
    expert_tensor = section.expert_tensor_parallel_size or tensor
    number = 2 if cfg.trainer.bf16 else 4
    in_layers = shape.parameters - shape.outside - shape.experts
    # The first stage holds the embedding, the last one the output layer: a copy where they are tied.
    ends = shape.outside if stages == 1 else shape.hidden * max(shape.words, 1)
    dense = in_layers // (tensor * stages) + ends // tensor
    experts = shape.experts // (expert * expert_tensor * stages)
    # At least one each: the search for changes also asks for layouts that the settings' rules refuse.
    replicas, expert_replicas = max(1, world // (tensor * stages)), max(1, world // (stages * expert * expert_tensor))
    common: dict[str, Any] = dict(
        weights=number * (dense + experts),
        number=number,
        stream=number,
        tokens_by=tensor,
        words_by=tensor,
        layers=-(-shape.num_layers // stages),
    )
    if isinstance(settings, RefConfig):
        return Division(**common)
    of_gradient = 4 if section.ddp_config.grad_reduce_in_fp32 else number
    part = dense // replicas + experts // expert_replicas
    return Division(
        keeps_gradients=True,
        gradients=of_gradient * (dense + experts),
        optimizer=8 * part + (4 * part if cfg.trainer.bf16 else 0),
        head_gradient=(4 + number) * shape.words * shape.hidden // tensor,
        layer_gradients=number * shape.layer // tensor // (expert if shape.experts else 1),
        step=4 * part if kind == "cuda" else 8 * shape.words * shape.hidden // tensor // replicas,
        in_flight=stages,
        **common,
    )


BACKENDS: dict[str, Callable[[SkyRLConfig, Role, ModelShape, Kind], Division]] = {
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "megatron": megatron,
}
"""Name in `TrainingBackendTraits.memory_like` -> division."""


def get_division_section(cfg: SkyRLConfig) -> str:
    """Return the section of a model's settings that shards it over ranks."""
    sections = {"megatron": "megatron_config", "deepspeed": "deepspeed_config"}
    return sections.get(cfg.trainer.strategy, "fsdp_config")
