"""Comparison of the weights sent to a vLLM worker with the weights that it computes with afterwards."""

import re
from collections.abc import Iterable
from typing import Any

import torch

from skyrl_train.inference_engines.vllm.layer_regions import (
    LayerReader,
    Region,
    find_expert_regions,
    find_layer_regions,
    is_experts,
)
from skyrl_train.inference_engines.vllm.weight_names import WeightNames
from skyrl_train.weight_sync.base import ProcessReport
from skyrl_train.weight_sync.fingerprint import Verification, VerificationSample, fingerprints_of

NamedTensor = tuple[str, torch.Tensor]

_EXPERTS = re.compile(r"(?P<layer>.*experts)\.(?:(?P<expert>\d+)\.)?(?P<kind>\w+?)(?:\.weight)?")
_BASE = ".base_layer"


class HeldWeights:
    """Map from a checkpoint's tensors to regions of a model.

    Args:
        tied: pairs (layer, layer that owns its weight).
    """

    def __init__(self, model: Any, tied: Iterable[tuple[Any, Any]]):
        self._layers = {name.replace(_BASE, ""): layer for name, layer in model.named_modules() if _has_own(layer)}
        self._names = WeightNames(model)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._new_prefixes: dict[str, str | None] = dict(getattr(mapper, "orig_to_new_prefix", None) or {})
        packed = dict(getattr(model, "packed_modules_mapping", None) or {})
        self._parts = {part: (whole, index) for whole, parts in packed.items() for index, part in enumerate(parts)}
        self._tied = list(tied)

    def find_regions(self, name: str, shape: torch.Size) -> list[Region]:
        """Return the regions of a tensor in this process; empty if not local or unknown."""
        name = self._names.to_vllm(name)
        return self._find_regions(name, shape) or self._find_regions(self._rename(name), shape)

    def _find_regions(self, name: str, shape: torch.Size) -> list[Region]:
        if (experts := _EXPERTS.fullmatch(name)) and (found := self._find_expert_regions(experts, shape)):
            return found
        path, _, parameter = name.rpartition(".")
        layer, part = self._layers.get(path), None
        if layer is None:
            parent, _, last = path.rpartition(".")
            whole, part = self._parts.get(last, (last, None))
            layer = self._layers.get(f"{parent}.{whole}" if parent else whole)
        if layer is None:
            return []
        found = find_layer_regions(layer, parameter, part, shape)
        for other in [tied for tied, source in self._tied if source is layer and parameter == "weight"]:
            shared = find_layer_regions(other, parameter, part, shape)
            found = found + shared if shared else []  # an unreadable region leaves the tensor unverified
        return found

    def _find_expert_regions(self, name: re.Match[str], shape: torch.Size) -> list[Region]:
        path = name["layer"]
        layer = self._layers.get(f"{path}.routed_experts") or self._layers.get(path)
        if layer is None or not is_experts(layer):
            return []
        gate, up, down = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        kinds = {gate: "gate", up: "up", down: "down", "gate_up_proj": "gate_up", "w13": "gate_up"}
        kind = kinds.get(name["kind"])
        expert = None if name["expert"] is None else int(name["expert"])
        return [] if kind is None else find_expert_regions(layer, kind, expert, shape)

    def _rename(self, name: str) -> str:
        """Convert a tensor name to vLLM's, by the model's renamed prefixes."""
        for old, new in self._new_prefixes.items():
            if name.startswith(old) and new is not None:
                return name.replace(old, new, 1)
        return name


class HeldComparison:
    """Comparison for one update: `add_expected` before tensors are loaded, then `build_report` from the loaded model.

    Expected values are fingerprints of a sample of every region, in the layer's dtype.
    """

    def __init__(self, weights: HeldWeights, process: str, version: int, verification: Verification):
        self._weights = weights
        self._sampling = VerificationSample(version, verification)
        self._report = ProcessReport(process=process, fingerprints={})
        self._expected: list[tuple[str, Region, int]] = []

    def add_expected(self, tensors: list[NamedTensor]) -> None:
        """Record tensors as received."""
        version, verification = self._sampling.version, self._sampling.verification
        self._report.fingerprints |= fingerprints_of(tensors, version, verification)
        if verification == "off":
            return
        for name, tensor in tensors:
            regions = self._weights.find_regions(name, tensor.shape)
            for region in regions:
                sample = region.sample_expected(tensor, self._sampling)
                self._expected.append((name, region, _compute_fingerprint(sample)))
                self._report.held_bytes += region.count_bytes(tensor)
                self._report.read_bytes += sample.numel() * sample.itemsize
            if regions:
                self._report.read.append(name)

    def build_report(self) -> ProcessReport:
        """Read every region from its layer."""
        reader = LayerReader(self._sampling)
        wrong = dict.fromkeys(
            name
            for name, region, expected in sorted(
                self._expected, key=lambda entry: (id(entry[1].layer), entry[1].parameter)
            )
            if _compute_fingerprint(reader.sample_loaded(region)) != expected
        )
        self._report.wrong = [name for name in self._report.read if name in wrong]
        return self._report


def _compute_fingerprint(sample: torch.Tensor) -> int:
    return fingerprints_of([("", sample)], 0, "full")[""]


def _has_own(layer: torch.nn.Module) -> bool:
    return any(parameter is not None for parameter in layer._parameters.values())
