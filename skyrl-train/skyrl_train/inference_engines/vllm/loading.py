"""New weights into the model of a vLLM worker, and a comparison with what it holds afterwards.

Weights go through vLLM's layerwise reload: a layer is made anew in its checkpoint form, loaded, processed (packed for
the CPU's kernels, quantized, ...) and copied to where it was, once all of its parts have come. So a bucket may end in
the middle of a layer; what is left of it here is that layer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.vllm.held_layers import is_experts
from skyrl_train.inference_engines.vllm.held_weights import HeldComparison, HeldWeights, NamedTensor
from skyrl_train.inference_engines.vllm.weight_names import WeightNames
from skyrl_train.weight_sync.base import ProcessReport
from skyrl_train.weight_sync.fingerprint import Verification


class ModelUpdate:
    """One update of a model: `load` any number of times, then `finish` or `discard`.

    Args:
        model: vLLM's.
        vllm_config: `VllmConfig`.
        version: the update's.
        verification: how much of a tensor its fingerprint reads; `off`: none are made.
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
        """Hand tensors (in the trainer's names) to the model. They may be overwritten afterwards.

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
            must_be_full: the weights before mean nothing (random, dropped), so every layer must have come.

        Returns:
            Fingerprints of the tensors as they came, and the names of those that the model computes otherwise with.

        Raises:
            WeightSyncError: a layer came in part, or not at all though it must; names it.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._check_layers(must_be_full)
        with self._set_vllm_context(), torch.no_grad():
            with _packing_experts(self._model):
                finalize_layerwise_reload(self._model, self._config.model_config)
            self._tie_again()
            return self._comparison.build_report()

    def discard(self) -> None:
        """Make the model whole again, of old and new layers: a later full update can come, generation must not."""
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
        """Layers that are not yet complete, with vLLM's notes on them."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                yield name, info

    def _copy_buffered(self) -> None:
        """vLLM holds on to the tensors of a layer until all have come; ours are the sender's memory, so copy those."""
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
            elif info.load_numel < total and not hasattr(layer, "num_embeddings_padded"):  # its padding never comes
                raise WeightSyncError(
                    f"the update of version {self._version} has only {info.load_numel} of the {total} numbers of layer "
                    f"{name}; send all of its parts (such as q_proj, k_proj and v_proj) in one update"
                )

    def _tie_again(self) -> None:
        """A layer that shares another one's weight got none of its own. On a CPU it still multiplies by a packed copy
        of the old one."""
        for layer, source in self._tied:
            layer.weight = source.weight
            layer.quant_method.process_weights_after_loading(layer)  # pyright: ignore


@contextmanager
def _packing_experts(model: torch.nn.Module) -> Iterator[None]:
    """Make vLLM pack the experts that are loaded meanwhile for the CPU. It does so only where a layer has no kernel yet
    (`unquantized_fused_moe_method.py`, `_setup_kernel`); a reload would leave them unpacked, and the layer compute
    nonsense. So the layers have none meanwhile."""
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
    """Attention layers hold scales that a checkpoint need not have."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return is_deferred_attention_layer(layer)


def _find_tied_layers(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """(layer, the layer whose weight it shares), such as an LM head and the embedding of a model with tied ones."""
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
