"""Loading of adapters in peft's format, with checks against the model. Features beyond a low-rank product added to a
linear layer, or to the same linear layer of all experts, are rejected by name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from skyrl_train.inference_engines.native.experts import PROJECTIONS, get_expert_shape, is_plain
from skyrl_train.models.adapter_files import can_be_sent_alone, read_adapter

_PREFIX = "base_model.model."
_OF_EXPERT = re.compile(rf"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>{'|'.join(PROJECTIONS)})")
_MATRIX = re.compile(rf"{re.escape(_PREFIX)}(?P<layer>.+)\.lora_(?P<kind>[AB])\.weight")
_MORE_THAN_A_PRODUCT = {
    "use_dora": "DoRA also scales the base layer's weight",
    "lora_bias": "its matrices have biases",
    "modules_to_save": "it adds full layers",
    "trainable_token_indices": "it adds embeddings",
    "target_parameters": "it adapts parameters outside linear layers, such as fused experts",
    "layer_replication": "it adds layers to the model",
    "alora_invocation_tokens": "it applies to only some of the tokens",
    "use_qalora": "QALoRA pools its inputs",
    "arrow_config": "Arrow mixes several adapters",
    "kasa_config": "KaSA also changes the base layer's weight",
    "monteclora_config": "MonteCLoRA samples its matrices",
    "use_bdlora": "its matrices are block-diagonal",
}


@dataclass(frozen=True)
class LayerMatrices:
    """Matrices of an adapted layer: W x becomes W x + scaling B A x."""

    a: torch.Tensor
    """[rank, in]; for experts [E, rank, in]"""
    b: torch.Tensor
    """[out, rank]; for experts [E, out, rank]"""
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


def read_lora(path: str, model: nn.Module, max_rank: int) -> dict[str, LayerMatrices]:
    """Read the matrices of an adapter by layer name; matrices of an expert projection are under the layer's and the
    projection's name.

    Raises:
        ValueError: no adapter in the folder, or one that does not fit; names the part and the reason.
    """
    file = read_adapter(path)
    _check_config(path, file.config)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in file.tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is not None:
            pairs.setdefault(match["layer"], {})[match["kind"]] = tensor
        elif not _is_the_models(name, tensor, model):
            raise _build_refusal(
                path,
                f"its tensor {name} is not a matrix of a linear layer of the model (embeddings have no adapters)",
            )
    if not pairs:
        raise _build_refusal(path, "it contains no tensors")
    modules = dict(model.named_modules())
    layers = {layer: _check_tensor(path, layer, pair, modules, file.config, max_rank) for layer, pair in pairs.items()}
    return _merge_experts(path, layers, modules)


def _merge_experts(
    path: str, layers: Mapping[str, LayerMatrices], modules: Mapping[str, nn.Module]
) -> dict[str, LayerMatrices]:
    found: dict[str, LayerMatrices] = {}
    of_experts: dict[tuple[str, str], dict[int, LayerMatrices]] = {}
    for name, matrices in layers.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            found[name] = matrices
        else:
            of_experts.setdefault((match["layer"], match["projection"]), {})[int(match["expert"])] = matrices
    for (layer, projection), by_expert in of_experts.items():
        num_experts, *_ = get_expert_shape(modules[layer], projection)
        missing = [expert for expert in range(num_experts) if expert not in by_expert]
        if missing:
            raise _build_refusal(
                path, f"{layer} has {num_experts} experts; {projection} of expert {missing[0]} is missing"
            )
        first = by_expert[0]
        if any((of.rank, of.scaling) != (first.rank, first.scaling) for of in by_expert.values()):
            raise _build_refusal(
                path, f"the experts of {layer} have adapters of several ranks or scalings on {projection}"
            )
        a, b = (torch.stack([getattr(by_expert[e], kind) for e in range(num_experts)]) for kind in "ab")
        found[f"{layer}.{projection}"] = LayerMatrices(a, b, first.scaling)
    return found


def _is_the_models(name: str, tensor: torch.Tensor, model: nn.Module) -> bool:
    """Return whether a tensor belongs to the model: peft adds embeddings and output layer if the latter is adapted."""
    own = dict(model.named_parameters(remove_duplicate=False)).get(
        name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    )
    return own is not None and own.shape == tensor.shape and torch.equal(own, tensor.to(own.device, own.dtype))


def get_tensor_names(layer: str) -> tuple[str, str]:
    """Return the names of A and B of a layer in peft's files."""
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"


def get_features(module: nn.Module) -> tuple[int, int]:
    """Return the input and output size of a layer that supports adapters."""
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def _check_config(path: str, config: Mapping[str, object]) -> None:
    if config.get("peft_type") != "LORA":
        raise _build_refusal(path, f"its peft_type is {config.get('peft_type')!r}, not LORA")
    for field, why in _MORE_THAN_A_PRODUCT.items():
        if config.get(field):
            raise _build_refusal(path, f"{field}={config[field]!r}: {why}")
    if config.get("bias", "none") != "none":
        raise _build_refusal(path, f"bias={config['bias']!r}: it includes biases of the model's layers")
    if not can_be_sent_alone(config.get("init_lora_weights")):
        raise _build_refusal(
            path,
            f"init_lora_weights={config['init_lora_weights']!r} moved part of the model's weights into the adapter; "
            "save it with peft's path_initial_model_for_weight_conversion",
        )


def _check_tensor(
    path: str,
    layer: str,
    pair: Mapping[str, torch.Tensor],
    modules: Mapping[str, nn.Module],
    config: Mapping[str, Any],
    max_rank: int,
) -> LayerMatrices:
    from peft.utils.other import get_pattern_key  # slow import, unused without adapters

    if set(pair) != {"A", "B"}:
        raise _build_refusal(path, f"{layer} has no lora_{'B' if 'A' in pair else 'A'}")
    a, b = pair["A"], pair["B"]
    num_in, num_out = _get_layer_features(path, layer, modules)
    rank = a.shape[0]
    if tuple(a.shape) != (rank, num_in) or tuple(b.shape) != (num_out, rank):
        raise _build_refusal(
            path, f"{layer} needs A [rank, {num_in}] and B [{num_out}, rank]; got {list(a.shape)} and {list(b.shape)}"
        )
    if rank > max_rank:
        raise _build_refusal(path, f"{layer} has rank {rank}, above the engine's max_lora_rank={max_rank}")
    alphas = config.get("alpha_pattern") or {}
    alpha = alphas.get(get_pattern_key(list(alphas), layer), config.get("lora_alpha", rank))
    return LayerMatrices(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _get_layer_features(path: str, layer: str, modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Return the input and output size of a layer or expert layer."""
    match = _OF_EXPERT.fullmatch(layer)
    experts = modules.get(match["layer"]) if match else None
    if match and experts is not None and is_plain(experts):
        num_experts, *shape = get_expert_shape(experts, match["projection"])
        if int(match["expert"]) >= num_experts:
            raise _build_refusal(path, f"{match['layer']} has {num_experts} experts, but no {layer}")
        return shape[1], shape[0]
    module = modules.get(layer)
    if module is None:
        raise _build_refusal(path, f"the model has no layer {layer}")
    if not isinstance(module, nn.Linear | Conv1D):
        raise _build_refusal(path, f"{layer} is a {type(module).__name__}, and only linear layers can have adapters")
    if ".experts." in layer:
        raise _build_refusal(
            path, f"{layer} belongs to an expert that is a separate module, for which adapters are not supported"
        )
    return get_features(module)


def _build_refusal(path: str, why: str) -> ValueError:
    return ValueError(f"the adapter in {path} cannot be loaded: {why}")
