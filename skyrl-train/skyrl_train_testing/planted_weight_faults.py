"""Mistakes between a vLLM worker's receipt of weights and the model that computes with them, planted on purpose.

    VLLMInferenceEngine(model, worker_extension_cls=EXTENSION)   ->   rpc("skyrl_plant", fault, processes)

Every fault expects one bucket a sync: it sees the whole model at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_train.inference_engines.vllm import loading
from skyrl_train.inference_engines.vllm.worker_extension import WeightExtension

EXTENSION = f"{__name__}.FaultyWeightExtension"

Weights = dict[str, torch.Tensor]
Change = Callable[[Weights, Weights], Weights]
"""Fault: from the new weights and those of the sync before to the weights that the loader gets."""


@dataclass(frozen=True)
class Fault:
    """A mistake of a loader, and the tensors that it concerns."""

    change: Change
    concerns: Callable[[str], bool]


def _skip(text: str) -> Fault:
    return Fault(lambda new, old: {name: new[name] for name in new if text not in name}, lambda name: text in name)


def _stale(text: str) -> Fault:
    return Fault(
        lambda new, old: {name: (old if text in name else new)[name] for name in new}, lambda name: text in name
    )


def _swap(one: str, other: str) -> Fault:
    def partner(name: str) -> str:
        return name.replace(one, other) if one in name else name.replace(other, one)

    return Fault(lambda new, old: {name: new[partner(name)] for name in new}, lambda name: one in name or other in name)


def _each(text: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return Fault(
        lambda new, old: {name: change(new[name]) if text in name else new[name] for name in new},
        lambda name: text in name,
    )


def _round(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


FAULTS: dict[str, Fault] = {
    "o_proj_skipped": _skip("layers.1.self_attn.o_proj"),
    "norm_skipped": _skip("layers.0.input_layernorm"),
    "final_norm_skipped": _skip("model.norm"),
    "layer_skipped": _skip("layers.1."),
    "embedding_skipped": _skip("embed_tokens"),
    "layers_swapped": _swap("layers.0.", "layers.1."),
    "key_and_value_swapped": _swap("k_proj", "v_proj"),
    "gate_and_up_swapped": _swap("gate_proj", "up_proj"),
    "transposed": _each("layers.0.self_attn.k_proj", lambda tensor: tensor.t().contiguous()),
    "rounded_to_fp8": _each("mlp.", _round),
    "scaled": _each("layers.0.mlp.down_proj", lambda tensor: tensor * 1.01),
    "one_tensor_stale": _stale("layers.1.mlp.up_proj"),
    "everything_stale": _stale(""),
    "tied_head_stale": Fault(lambda new, old: new, lambda name: "embed_tokens" in name),
    "packed_layer_stale": Fault(lambda new, old: new, lambda name: "layers.0.self_attn.o_proj" in name),
}
"""Faults for models with tied embeddings, at least two layers and square key and value projections."""

FAULTS_OF_PACKING = ("tied_head_stale", "packed_layer_stale")
"""Faults of copies that vLLM packs for the instructions of a CPU (AVX-512 and AMX; without them there are none)."""

FAULTS_OF_EXPERTS: dict[str, Fault] = {
    "experts_stale": _stale("layers.1.mlp.experts.down_proj"),
    "experts_moved_by_one": _each("layers.0.mlp.experts.down_proj", lambda stack: stack.roll(1, dims=0)),
    "gate_and_up_of_experts_swapped": _each(
        "layers.0.mlp.experts.gate_up_proj", lambda stack: torch.cat(stack.chunk(2, dim=1)[::-1], dim=1)
    ),
    "router_stale": _stale("layers.1.mlp.gate."),
}
"""Faults for mixtures whose experts are sent as stacks."""


class FaultyWeightExtension(WeightExtension):
    """The worker extension with a fault in it."""

    _old: Weights | None = None
    _new: Weights | None = None
    _planted: str | None = None
    _old_product: Any = None

    def skyrl_plant(self, fault: str | None, processes: list[str]) -> bool:
        """Plant a fault in the processes of these names (as reports name them); None removes it. Everywhere the
        weights of the last sync are kept from here on.

        Returns: False for a fault that cannot exist on this machine.
        """
        model: Any = self.model_runner.get_model()
        vars(model).pop("load_weights", None)
        here = fault is not None and self._process_name() in processes
        load = model.load_weights

        def load_weights(tensors: Any) -> Any:
            new = {name: tensor.clone() for name, tensor in tensors}
            self._old, self._new = self._new, new
            given = (FAULTS | FAULTS_OF_EXPERTS)[fault].change(new, self._old or new) if here and fault else new
            return load(given.items())

        model.load_weights = load_weights
        self._planted = fault if here else None
        return fault not in FAULTS_OF_PACKING or self._packs_layers()

    def _packs_layers(self) -> bool:
        """Return True if layers multiply by a packed copy of their weight, whatever weight they are given."""
        layer = self._packed_layer()
        if layer.weight.ndim != 2:  # vLLM keeps the packed copy alone
            return True
        ones = torch.ones(1, layer.weight.shape[1], dtype=layer.weight.dtype)
        return bool(layer.cpu_linear(ones, torch.zeros_like(layer.weight), None).any())

    def skyrl_finish(self, version: int) -> dict[str, Any]:
        tie: Any = loading.ModelUpdate._tie_again
        if self._planted == "tied_head_stale":
            setattr(loading.ModelUpdate, "_tie_again", lambda update: None)  # noqa: B010
        if self._planted == "packed_layer_stale":
            self._packed_layer().cpu_linear = self._old_product
        try:
            return super().skyrl_finish(version)
        finally:
            setattr(loading.ModelUpdate, "_tie_again", tie)  # noqa: B010

    def skyrl_update(self, request: dict[str, Any]) -> None:
        if request["index"] == 0:
            self._old_product = self._packed_layer().cpu_linear
        super().skyrl_update(request)

    def _packed_layer(self) -> Any:
        return self.model_runner.get_model().model.layers[0].self_attn.o_proj
