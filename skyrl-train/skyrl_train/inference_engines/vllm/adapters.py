"""Low-rank adapters in vLLM: checks before loading, and fingerprints of the loaded tensors."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.fingerprint import Verification, fingerprint_of


def check_adapter(path: str) -> None:
    """Raise WeightSyncError if vLLM could not load the folder, or would not apply all of it."""
    file = Path(path) / "adapter_model.safetensors"
    if not file.is_file():
        raise WeightSyncError(f"no adapter found in {path}: {file.name} is missing")
    with safe_open(file, framework="pt") as tensors:
        of_head = [name for name in tensors.keys() if "lm_head" in name]  # noqa: SIM118
    if of_head:
        raise WeightSyncError(
            f"the adapter in {path} changes the LM head ({of_head[0]}), for which the vllm engine does not support "
            "adapters; remove lm_head from trainer.policy.model.lora.target_modules, or use generator.backend=native"
        )


def remove_head_adapter(model: torch.nn.Module) -> None:
    """Remove adapters from the LM head. vLLM adds one for all models; on a CPU it gathers vocabulary x rank numbers per
    token, and prompt log-probs fail under it (`vllm/lora/punica_wrapper/punica_cpu.py`, `add_lora_logits`: it has one
    adapter per request, but gets one row per prompt token).
    """
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LogitsProcessorWithLoRA):
                setattr(parent, name, child.base_layer)


def compute_loaded_fingerprints(
    runner: Any, lora_id: int, path: str, version: int, verification: Verification
) -> dict[str, int]:
    """Compute fingerprints of an adapter file's tensors by name; tensors that vLLM's copy differs from or lacks are
    omitted.

    vLLM stores A unchanged and B times the adapter's scaling, both in its own dtype and with the parts of a fused layer
    (q, k and v) concatenated. The file's tensors are converted the same way and compared exactly.

    Args:
        runner: vLLM's model runner.
        lora_id: vLLM's number of the adapter loaded from the folder `path`.
    """
    if verification == "off":
        return {}
    from vllm.lora.peft_helper import PEFTHelper

    manager = runner.lora_manager._adapter_manager
    adapter = manager.get_adapter(lora_id)
    if adapter is None:
        return {}
    helper = PEFTHelper.from_local_dir(path, None)
    packed = {part: (whole, i) for whole, parts in manager.packed_modules.items() for i, part in enumerate(parts)}
    fingerprints = {}
    with safe_open(Path(path) / "adapter_model.safetensors", framework="pt") as file:
        for name in list(file.keys()):
            tensor: torch.Tensor = file.get_tensor(name)
            module, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
            expert = ".experts." in module  # stacked and sharded differently: assumed to equal the file
            if expert or _is_held(adapter.loras, packed, module, kind[:1], tensor, helper):
                fingerprints[name] = fingerprint_of(tensor, version, verification)
    return fingerprints


def _is_held(
    held: dict[str, Any], packed: dict[str, tuple[str, int]], module: str, kind: str, tensor: torch.Tensor, helper: Any
) -> bool:
    whole, index = packed.get(module, (module, None))
    if whole not in held:
        whole, index = module, None
    weights = held.get(whole)
    if weights is None or kind not in ("A", "B"):
        return False
    present = weights.lora_a if kind == "A" else weights.lora_b
    if index is not None:
        present = present[index]
    if present is None:
        return False
    expected = tensor.to(present.device, present.dtype)
    scaling = helper.get_rank_and_scaling(module)[1]
    if kind == "B" and scaling != 1:
        expected = expected * scaling
    return torch.equal(expected, present)
