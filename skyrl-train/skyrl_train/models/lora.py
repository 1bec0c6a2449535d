"""Low-rank adapters (https://arxiv.org/abs/2106.09685), implemented by peft: W x becomes W x + (alpha / rank) B A x,
with W frozen and A [rank, in], B [out, rank] trained.

Adapters are inserted into the transformers model without a wrapper, so that other modules need not know of them. They
are merged one tensor at a time when weights are sent to an engine or exported; adapter-only files use peft's format
(`adapter_files.py`).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from skyrl_train.config import LoRAConfig
from skyrl_train.distributed.sharded_tensor import gather_full_tensor, gather_full_tensors
from skyrl_train.errors import ConfigError
from skyrl_train.models.cpu_linear import OneDnnLinear, enable_onednn_linear
from skyrl_train.models.persistent_buffers import iter_persistent_buffers
from skyrl_train.models.weight_files import get_name_in_files, plan_dtypes

if TYPE_CHECKING:  # a process without adapters avoids importing peft, which takes most of a second
    from peft import LoraConfig
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ADAPTER = "default"  # peft's name of the only adapter; it does not appear in files
INIT_METHODS = ("kaiming", "gaussian", "orthogonal", "olora", "pissa")  # methods that need the weights only, no data
PARTS_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Module names that peft treats as parts of experts, anywhere in a model, if the model's experts are fused."""


def has_weight_based_init(config: LoRAConfig) -> bool:
    """Return whether the initialization moves parts of the adapted weights into the adapters, changing the weights."""
    return config.rank > 0 and config.init_method.startswith(("olora", "pissa"))


def add_adapters(model: "PreTrainedModel", config: LoRAConfig, *, setting: str = "model.lora") -> None:
    """Add adapters to layers of a model and freeze everything else, in place. Call it before sharding.

    `all-linear` means all linear layers of the decoder (not of an image encoder) except the output layer. Experts fused
    into three-dimensional parameters, and their router, have no linear layers and get no adapter: in such a model only
    the surrounding layers (attention) do.

    Args:
        model: unsharded, on one device, equal on all ranks; its random state determines the initialization.
        setting: name of the section `config`, for errors.

    Raises:
        ConfigError: a name matches no layer, or an unsupported one; an unknown initialization.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(_build_peft_config(model, config, setting), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"{setting}.target_modules={config.target_modules!r}: {error}") from error
    _check_mergeable(model, config, setting)
    # A and B are new linear layers: they use the same kernels as the base layers.
    if any(isinstance(module, OneDnnLinear) for module in model.modules()):
        enable_onednn_linear(model)
    kinds = {adapter.layer.rpartition(".")[2] for adapter in find_adapters(model)}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "adapters of rank %d on %s: %s of %s parameters are trained%s",
        config.rank,
        ", ".join(sorted(kinds)),
        f"{trained:,}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "; experts and routers have no adapters" if has_fused_experts(model) else "",
    )


def _build_peft_config(model: "PreTrainedModel", config: LoRAConfig, setting: str) -> "LoraConfig":
    from peft import LoraConfig

    if config.init_method.partition("_niter_")[0] not in INIT_METHODS:
        raise ConfigError(
            f"{setting}.init_method must be one of {', '.join(INIT_METHODS)} (or pissa_niter_N); "
            f"got {config.init_method!r}"
        )
    targets = config.target_modules
    if targets == "all-linear" and (has_fused_experts(model) or find_non_text_modules(model)):
        # peft's own `all-linear` would also select parts of experts by name, and fail at three-dimensional parameters,
        # and select layers that text does not reach.
        targets = _find_linear_layers_near_experts(model)
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=config.exclude_modules,
        init_lora_weights=True if config.init_method == "kaiming" else config.init_method,  # type: ignore[arg-type]
        task_type="CAUSAL_LM" if model.get_output_embeddings() is not None else None,
    )


def has_fused_experts(model: "PreTrainedModel") -> bool:
    """Return whether the matrices of a model's experts are one parameter."""
    return any(
        parameter.dim() == 3
        for module in model.get_decoder().modules()
        if not isinstance(module, nn.Conv1d)  # of linear attention
        for parameter in module.parameters(recurse=False)
    )


def find_non_text_modules(model: "PreTrainedModel") -> set[str]:
    """Return the names of modules with parameters that text does not reach, outside of decoder and output layer: image
    encoders."""
    decoder = model.get_decoder()
    inside = {id(module) for module in (*decoder.modules(), model.get_output_embeddings())}
    # Modules that contain the decoder do not count.
    around = {id(module) for module in model.modules() if any(part is decoder for part in module.modules())}
    return {name for name, module in model.named_modules() if id(module) not in inside | around}


def _find_linear_layers_near_experts(model: "PreTrainedModel") -> list[str]:
    output_layer, beside = model.get_output_embeddings(), find_non_text_modules(model)
    of_experts = PARTS_OF_EXPERTS if has_fused_experts(model) else frozenset[str]()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not output_layer
        and name not in beside
        and name.rpartition(".")[2] not in of_experts
    ]


def _check_mergeable(model: "PreTrainedModel", config: LoRAConfig, setting: str) -> None:
    """Reject adapters that log-probs or exports would ignore: of embeddings and the output layer (log-probs are
    computed from hidden states and the output layer's weight), and of fused experts (exports)."""
    from peft.tuners.lora import Linear as AdaptedLinear
    from peft.tuners.lora import LoraLayer

    output_layer = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not isinstance(module, AdaptedLinear) or module is output_layer:
            raise ConfigError(
                f"{setting}.target_modules={config.target_modules!r} names {name}, which cannot have an adapter: only "
                "linear layers before the output layer can, not embeddings or fused experts. `all-linear` selects "
                "all layers that can"
            )


@dataclass(frozen=True)
class Adapter:
    """Adapter of one layer: adds `scaling` B A to its weight."""

    layer: str
    """The layer's name in the transformers model."""

    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    is_transposed: bool
    """True if the layer stores its weight as [in, out] (GPT-2)."""

    @property
    def matrices(self) -> dict[str, nn.Parameter]:
        """A and B by their names in peft's files."""
        prefix = f"base_model.model.{self.layer}"
        return {f"{prefix}.lora_A.weight": self.a, f"{prefix}.lora_B.weight": self.b}

    def merge_into(self, weight: torch.Tensor) -> torch.Tensor:
        """Merge into the layer's gathered weight and return a new tensor. A collective."""
        # Both gathers on every rank, in this order: they are collectives, and ranks with different orders deadlock.
        a, b = gather_full_tensor(self.a), gather_full_tensor(self.b)
        # (B A)^T = A^T B^T: for a layer that stores [in, out] the product is transposed without a copy.
        left, right = (a.t(), b.t()) if self.is_transposed else (b, a)
        return torch.addmm(weight.float(), left, right, alpha=self.scaling)


def find_adapters(model: nn.Module) -> Iterator[Adapter]:
    """Return the adapters of a transformers model, in its order."""
    if "peft_config" not in vars(model):  # peft leaves it on adapted modules
        return
    from peft.tuners.lora import Linear as AdaptedLinear

    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield Adapter(
                layer=name,
                a=module.get_parameter(f"lora_A.{ADAPTER}.weight"),
                b=module.get_parameter(f"lora_B.{ADAPTER}.weight"),
                scaling=module.scaling[ADAPTER],
                is_transposed=module.fan_in_fan_out,
            )


def gather_exported_parameters(
    model: nn.Module, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter gathered, under its name in transformers, with its adapter merged: W + (alpha / rank) B A.
    In the same order on every rank, few at a time; tied parameters appear once. Persistent buffers follow, unchanged. A
    collective.

    Args:
        model: a transformers model, or an object with one as `causal_lm`; with or without adapters, sharded or not.
        dtype: dtype to cast parameters to, except for those that transformers then keeps in float32. Each rank casts
            its
            shard before sending: the same bits for half the traffic; a weight with an adapter is cast after merging.
    """
    causal_lm: Any = get_transformers_model(model)
    planned = plan_dtypes(causal_lm, dtype)
    adapters = {f"{adapter.layer}.base_layer.weight": adapter for adapter in find_adapters(causal_lm)}
    matrices = {id(matrix) for adapter in adapters.values() for matrix in adapter.matrices.values()}

    def iter_for_gather() -> Iterator[tuple[tuple[str, torch.dtype, Adapter | None], torch.Tensor, torch.dtype]]:
        for name, parameter in causal_lm.named_parameters():
            # By identity: names of A and B differ between peft's versions, and they are exported merged only.
            if id(parameter) in matrices:
                continue
            own_name = get_name_in_files(name)
            own_dtype = planned(own_name) or dtype
            adapter = adapters.get(name)
            yield (own_name, own_dtype, adapter), parameter, own_dtype if adapter is None else parameter.dtype

    for (name, own_dtype, adapter), whole in gather_full_tensors(iter_for_gather()):
        yield name, whole if adapter is None else adapter.merge_into(whole).to(own_dtype)
    # Every rank holds them unsharded. They keep their dtype: a routing bias in bfloat16 would choose other experts.
    yield from iter_persistent_buffers(causal_lm)


def get_transformers_model(model: nn.Module) -> nn.Module:
    """Return the transformers model of an object that has one as `causal_lm`, or `model` itself."""
    return getattr(model, "causal_lm", model)
