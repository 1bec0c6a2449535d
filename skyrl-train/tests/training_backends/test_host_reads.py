"""A gradient reads no value of the device before its last micro-batch is queued."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.workers.objectives.critic import CriticObjective
from skyrl_train.workers.objectives.policy import PolicyObjective
from skyrl_train_testing.backend_checks import make_backend_batch, make_settings

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}


class NoHostReads(TorchDispatchMode):
    """Refuses operations for which the host waits for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket.__name__.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for part in args
            if isinstance(part, list | tuple)
            for index in part
        )
        assert func.overloadpacket.__name__ not in READS and not by_mask, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_host_reads(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        with NoHostReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class UnreadBackend(FSDP2Backend):
    """Refuses host reads in forward, loss and backward of its micro-batches."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        with refuse_host_reads(self.device):
            return super().compute(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        with refuse_host_reads(self.device):
            super().backward(loss)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name, settings",
    [
        ("policy", {}),
        ("policy", {"gradient_checkpointing": True, "bf16": True}),
        ("policy", {"use_shared_prefixes": True, "algorithm": {"use_kl_loss": True, "use_entropy_loss": True}}),
        ("critic", {}),
    ],
    ids=["packed", "checkpointed", "shared prefixes", "critic"],
)
def test_gradient_reads_device_only_at_end(tiny_model: str, name: Any, settings: dict[str, Any], device: str):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cfg = make_settings(tiny_model, settings, name, device=device)
    backend = UnreadBackend(cfg, name, 10)
    backend.join(RankInfo(device="cuda:0" if device == "cuda" else device))
    try:
        backend.load_model()
        policy = PolicyObjective(cfg.trainer.algorithm, PolicyLossRegistry.get("regular"))
        objective = CriticObjective(cfg.trainer.algorithm) if name == "critic" else policy

        class Unread:
            needs_entropy = objective.needs_entropy

            def __call__(self, scores: Any, micro_batch: TrainingInputBatch) -> Any:
                with refuse_host_reads(backend.device):
                    return objective(scores, micro_batch)

        batch = make_backend_batch()
        batch["base_action_log_probs"] = torch.zeros_like(batch.tensor("loss_mask"))
        gradient = backend.forward_backward(batch, [MicroBatch((0, 1, 2)), MicroBatch((3, 4, 5, 6))], Unread())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert gradient.sums["num_tokens"] == batch.tensor("loss_mask").sum().item()
