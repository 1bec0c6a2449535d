"""Training backends keep the invariances of an optimizer step, and the check sees those that do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sgd_backend import SGDBackend

from skyrl_train.training_backends.base import TrainingBackend
from skyrl_train.training_backends.fsdp2 import backend as fsdp2
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train_testing.backend_checks import check_training_backend
from skyrl_train_testing.findings import INVARIANCES, InvarianceError


@pytest.mark.first_case
@pytest.mark.parametrize("backend", [FSDP2Backend, SGDBackend])
def test_backend_passes_invariance_checks(backend: type[TrainingBackend], tiny_model: str):
    check_training_backend(backend, tiny_model)


@pytest.mark.slow
def test_backend_passes_invariance_checks_with_adapters(tiny_model: str):
    policy = {
        "model": {"path": tiny_model, "lora": {"rank": 4, "init_method": "orthogonal"}},
        "optimizer_config": {"lr": 1e-2, "max_grad_norm": 0.01, "scheduler": "linear"},
    }
    reason = {"agreement": "the model without a backend draws other adapters"}
    check_training_backend(FSDP2Backend, tiny_model, settings={"policy": policy}, exempt=reason)


@pytest.mark.gpu
def test_backend_passes_invariance_checks_on_gpu(tiny_model: str):
    reason = {"agreement": "kernels of a GPU add in another order than those of the model on the CPU"}
    check_training_backend(FSDP2Backend, tiny_model, exempt=reason, device="cuda")


Plant = Callable[[pytest.MonkeyPatch], None]


def clipping_each_micro_batch(plant: pytest.MonkeyPatch) -> None:
    right = FSDP2Backend.backward

    def backward(backend: FSDP2Backend, loss: torch.Tensor) -> None:
        right(backend, loss)
        fsdp2.clip_grad_norm(backend._get_trained_parameters(), 0.05)

    plant.setattr(FSDP2Backend, "backward", backward)


def weights_of_each_micro_batch(plant: pytest.MonkeyPatch) -> None:
    """The token mean of each micro-batch, in place of the mini-batch's."""
    right = TrainingBackend.forward_backward

    def forward_backward(backend: Any, batch: Any, micro_batches: Any, objective: Any) -> Any:
        for micro_batch in micro_batches:
            rows = list(micro_batch.rows)
            mask = batch.tensor("loss_mask")[rows]
            batch["loss_weights"] = batch.tensor("loss_weights").clone()
            batch.tensor("loss_weights")[rows] = mask / mask.sum() / len(micro_batches)
        return right(backend, batch, micro_batches, objective)

    plant.setattr(FSDP2Backend, "forward_backward", forward_backward)


def dummy_micro_batches_that_count(plant: pytest.MonkeyPatch) -> None:
    plant.setattr("skyrl_train.training_backends.base.build_dummy", lambda micro: micro)


def steps_on_broken_gradients(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(fsdp2.math, "isfinite", lambda _: True)


def gradients_that_stay(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(torch.optim.AdamW, "zero_grad", lambda optimizer: None)


def temperature_forgotten(plant: pytest.MonkeyPatch) -> None:
    right = FSDP2Backend.score

    def score(backend: FSDP2Backend, *args: Any, **kwargs: Any) -> Any:
        sampling = backend.cfg.generator.sampling_params
        kept, sampling.temperature = sampling.temperature, 1.0
        try:
            return right(backend, *args, **kwargs)
        finally:
            sampling.temperature = kept

    plant.setattr(FSDP2Backend, "score", score)


def checkpoints_without_optimizer(plant: pytest.MonkeyPatch) -> None:
    right = FSDP2Backend.load

    def load(backend: FSDP2Backend, folder: Any) -> None:
        right(backend, folder)
        backend.optimizer.state.clear()

    plant.setattr(FSDP2Backend, "load", load)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("fault", "invariance"),
    [
        (clipping_each_micro_batch, "micro_batches"),
        (weights_of_each_micro_batch, "micro_batches"),
        (dummy_micro_batches_that_count, "micro_batches"),
        (steps_on_broken_gradients, "skipped_update"),
        (gradients_that_stay, "forgotten_gradient"),
        (temperature_forgotten, "agreement"),
        (checkpoints_without_optimizer, "deterministic"),
    ],
)
def test_check_detects_injected_fault(fault: Plant, invariance: str, tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    exempt = {name: "another rule's fault is injected" for name in INVARIANCES if name != invariance}
    with pytest.raises(InvarianceError) as caught:
        check_training_backend(FSDP2Backend, tiny_model, exempt=exempt)
    assert caught.value.names == [invariance]
