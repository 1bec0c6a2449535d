"""Loading of new weights into a vLLM worker's model, and verification afterwards.

Weights are loaded by vLLM's layerwise reload: once all parts of a layer are received, it is rebuilt in its checkpoint
form, loaded, processed (packed for the CPU's kernels, quantized, ...) and copied to its original memory. A bucket may
end within a layer; the incomplete layer is buffered.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.vllm.held_weights import HeldComparison, HeldWeights, NamedTensor
from skyrl_train.inference_engines.vllm.layer_regions import is_experts
from skyrl_train.inference_engines.vllm.weight_names import WeightNames
from skyrl_train.weight_sync.base import ProcessReport
from skyrl_train.weight_sync.fingerprint import Verification


class ModelUpdate:
    """One update of a model: call `load` any number of times, then `finish` or `discard`.

    Args:
        model: vLLM's model.
        vllm_config: `VllmConfig`.
        version: weight version of the update.
        verification: fraction of a tensor that its fingerprint reads; `off`: no fingerprints.
        process: the name of this process in reports.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, version: int, verification: Verification, process: str
    ):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._model = model
        self._config = vllm_config
        self._version = version
        self._tied = _find_tied_layers(model)
        self._names = WeightNames(model)
        self._comparison = HeldComparison(HeldWeights(model, self._tied), process, version, verification)
        with self._set_vllm_context():
            initialize_layerwise_reload(model)

    def load(self, tensors: list[NamedTensor]) -> None:
        """Load tensors (with the trainer's names) into the model. They may be overwritten afterwards.

        Raises:
            WeightSyncError: the model has no such parameter, or another shape.
        """
        self._comparison.add_expected(tensors)
        try:
            with self._set_vllm_context(), torch.no_grad(), _packing_experts(self._model):
                given = (pair for name, tensor in tensors for pair in self._names.iter_checkpoint_tensors(name, tensor))
                self._model.load_weights(given)  # pyright: ignore[reportCallIssue]
        except (ValueError, KeyError, AssertionError, RuntimeError) as error:
            names = ", ".join(name for name, _ in tensors)
            raise WeightSyncError(
                f"vLLM's {type(self._model).__name__} did not take a bucket of weights ({names}): "
                f"{type(error).__name__}: {error}"
            ) from error
        self._copy_buffered()

    def finish(self, must_be_full: bool) -> ProcessReport:
        """Put the new weights in place.

        Args:
            must_be_full: the previous weights are invalid (random, dropped), so every layer must be received.

        Returns:
            Fingerprints of the received tensors, and the names of tensors that differ in the model.

        Raises:
            WeightSyncError: a layer is incomplete, or missing although required; names it.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._check_layers(must_be_full)
        with self._set_vllm_context(), torch.no_grad():
            with _packing_experts(self._model):
                finalize_layerwise_reload(self._model, self._config.model_config)
            self._tie_again()
            return self._comparison.build_report()

    def discard(self) -> None:
        """Restore a consistent model of old and new layers, so that a later full update works; it must not generate
        before.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for _, info in self._iter_incomplete_layers():
            info.loaded_weights.clear()
            info.load_numel = 0
        with self._set_vllm_context(), torch.no_grad():
            with _packing_experts(self._model):
                finalize_layerwise_reload(self._model, self._config.model_config)
            self._tie_again()

    def _set_vllm_context(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)

    def _iter_incomplete_layers(self) -> Iterable[tuple[str, Any]]:
        """Yield incomplete layers with vLLM's loading state."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                yield name, info

    def _copy_buffered(self) -> None:
        """Copy the tensors that vLLM buffers until a layer is complete, since they are views of the sender's memory."""
        for _, info in self._iter_incomplete_layers():
            for parameter_name, arguments in info.loaded_weights:
                del parameter_name
                for key, value in arguments.arguments.items():
                    if key != "param" and isinstance(value, torch.Tensor):
                        arguments.arguments[key] = value.clone()

    def _check_layers(self, must_be_full: bool) -> None:
        modules = dict(self._model.named_modules())
        tied = {id(layer) for layer, _ in self._tied}
        for name, info in self._iter_incomplete_layers():
            layer = modules[name]
            total = sum(parameter.numel() for parameter in layer._parameters.values() if parameter is not None)
            if not total or id(layer) in tied or _has_optional_weights(layer):
                continue
            if not info.load_numel:
                if must_be_full:
                    raise WeightSyncError(f"the update of version {self._version} lacks the weights of layer {name}")
            elif info.load_numel < total and not hasattr(layer, "num_embeddings_padded"):  # its padding is never sent
                raise WeightSyncError(
                    f"the update of version {self._version} has only {info.load_numel} of the {total} numbers of layer "
                    f"{name}; send all of its parts (such as q_proj, k_proj and v_proj) in one update"
                )

    def _tie_again(self) -> None:
        """Tie weights again: a layer that shares another layer's weight received none. On a CPU it still multiplies by
        a packed copy of the old weight.
        """
        for layer, source in self._tied:
            layer.weight = source.weight
            layer.quant_method.process_weights_after_loading(layer)  # pyright: ignore


@contextmanager
def _packing_experts(model: torch.nn.Module) -> Iterator[None]:
    """Remove the kernels of expert layers during loading, so that vLLM packs the experts for the CPU. It packs only
    layers without a kernel (`unquantized_fused_moe_method.py`, `_setup_kernel`); a reload would leave them unpacked and
    give wrong results.
    """
    methods: list[Any] = [layer.quant_method for layer in model.modules() if is_experts(layer)]
    backends = [getattr(getattr(method, "unquantized_backend", None), "name", "") for method in methods]
    kernels = [(method, method.moe_kernel) for method, name in zip(methods, backends, strict=True) if name == "CPU"]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            method.moe_kernel = kernel


def _has_optional_weights(layer: torch.nn.Module) -> bool:
    """Return whether all weights of a layer are optional: attention layers have scales that checkpoints may lack."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return is_deferred_attention_layer(layer)


def _find_tied_layers(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Find pairs (layer, layer that owns its weight), such as an LM head and a tied embedding."""
    seen: dict[int, torch.nn.Module] = {}
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel() or not hasattr(layer, "quant_method"):
            continue
        source = seen.setdefault(weight.data_ptr(), layer)
        if source is not layer:
            tied.append((layer, source))
    return tied
