"""AdamW of one model's vector is torch's, and what belongs to it."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tx.errors import ModelError
from tx.tinker.backends.torch.adam import AdamState, adamw, clip_gradient
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, TrainingPass

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(),
        AdamParams(learning_rate=0.1, beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.3),
        AdamParams(learning_rate=0.01, beta1=0.0, beta2=0.0, eps=1e-8),
    ],
)
def test_adam_steps_match_torch(params: AdamParams) -> None:
    torch.manual_seed(0)
    theirs = torch.randn(100, requires_grad=True)
    ours = AdamState(theirs.detach().clone(), torch.zeros(100), torch.zeros(100))
    betas = (params.beta1, params.beta2)
    optimizer = torch.optim.AdamW(
        [theirs], lr=params.learning_rate, betas=betas, eps=params.eps, weight_decay=params.weight_decay, foreach=False
    )
    for step in range(1, 6):
        gradient = torch.randn(100)
        theirs.grad = gradient
        optimizer.step()
        ours = adamw(ours, gradient, step, params)
        torch.testing.assert_close(ours.weights, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-300])
def test_eps_zero_keeps_weights_without_gradient(eps: float) -> None:
    before = AdamState(torch.ones(2), torch.zeros(2), torch.zeros(2))
    after = adamw(before, torch.tensor([0.0, 4.0]), 1, AdamParams(learning_rate=0.1, eps=eps))
    torch.testing.assert_close(after.weights, torch.tensor([1.0, 0.9]))


@pytest.mark.parametrize("largest, expected", [(0.0, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_clipping_by_norm(largest: float, expected: list[float]) -> None:
    gradient = torch.tensor([3.0, 4.0])
    shorter, norm = clip_gradient(gradient, largest)
    assert norm == 5.0 and gradient.tolist() == [3.0, 4.0]
    torch.testing.assert_close(shorter, torch.tensor(expected))


def one_pass(backend: TorchTraining, data: list[Datum], model_id: str = "m") -> None:
    backend.run([TrainingPass(model_id, data, "cross_entropy")])


@pytest.fixture
def backend(model_folder: Make) -> TorchTraining:
    backend = TorchTraining(model_folder("llama"))
    backend.create("m", LoraSpec(rank=4))
    return backend


def test_step_without_gradient_changes_nothing(backend: TorchTraining, supervised: Supervised) -> None:
    one_pass(backend, supervised([5]))
    first = backend.optim_step("m", AdamParams(weight_decay=0.1))
    assert first["grad_norm:mean"] > 0 and first["step:max"] == 1
    adapter = backend.adapters["m"]
    assert adapter.mean is not None
    before = [adapter.weights.clone(), adapter.mean.clone()]
    assert backend.optim_step("m", AdamParams(weight_decay=0.1))["grad_norm:mean"] == 0
    assert adapter.step == 1 and torch.equal(adapter.weights, before[0]) and torch.equal(adapter.mean, before[1])


def test_forward_only_leaves_no_gradient(backend: TorchTraining, supervised: Supervised) -> None:
    backend.run([TrainingPass("m", supervised([5]), "cross_entropy", forward_only=True)])
    assert backend.adapters["m"].gradient is None


def test_nonfinite_gradient_is_refused_and_cleared(backend: TorchTraining, supervised: Supervised) -> None:
    (datum,) = supervised([5])
    datum.inputs["weights"][2] = np.nan
    before = backend.adapters["m"].weights.clone()
    one_pass(backend, [datum])
    with pytest.raises(ModelError, match="not finite"):
        backend.optim_step("m", AdamParams())
    assert torch.equal(backend.adapters["m"].weights, before)
    one_pass(backend, supervised([5]))
    assert np.isfinite(backend.optim_step("m", AdamParams())["grad_norm:mean"])


IMPOSSIBLE = {
    "learning rate": (AdamParams(learning_rate=1e30), "adam_params.learning_rate=1e+30"),
    "learning rate beyond float32": (
        AdamParams(learning_rate=1e300),
        "adam_params.learning_rate=1e+300 / (1 - beta1^2) is",
    ),
    "weight decay": (AdamParams(learning_rate=0.1, weight_decay=1e30), "adam_params.weight_decay=1e+30"),
    "both": (AdamParams(learning_rate=1e200, weight_decay=1e200), "adam_params.weight_decay is inf"),
    "eps": (AdamParams(eps=1e300), "adam_params.eps is 1e+300"),
    "beta1": (AdamParams(beta1=1.0), "adam_params.beta1 must be from 0 to below 1"),
    "beta2": (AdamParams(beta2=1.0), "adam_params.beta2 must be from 0 to below 1"),
    "second moment": (AdamParams(), "second moment"),
}


def saved(backend: TorchTraining, folder: Path, model_id: str = "m") -> dict[str, bytes]:
    folder.mkdir()
    backend.save(model_id, folder, state=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_failing_step_changes_no_bit_and_names_cause(
    backend: TorchTraining, supervised: Supervised, tmp_path: Path, what: str
) -> None:
    one_pass(backend, supervised([5]))
    backend.optim_step("m", AdamParams(learning_rate=0.01))  # with moments to lose
    data = supervised([9])
    if what == "second moment":
        data[0].inputs["weights"] *= np.float32(1e25)  # squared above 3e38
    one_pass(backend, data)
    before = saved(backend, tmp_path / "before")
    params, cause = IMPOSSIBLE[what]
    with pytest.raises(ModelError, match=f"nothing changed.*{re.escape(cause)}"):
        backend.optim_step("m", params)
    assert saved(backend, tmp_path / "after") == before
    possible = AdamParams(learning_rate=0.01, grad_clip_norm=1.0)  # with the same gradient
    assert backend.optim_step("m", possible)["step:max"] == 2


def test_large_finite_step_is_applied(backend: TorchTraining, supervised: Supervised) -> None:
    one_pass(backend, supervised([5]))
    backend.optim_step("m", AdamParams(learning_rate=1e9, weight_decay=1e-9))
    weights = backend.adapters["m"].weights
    assert weights.isfinite().all() and weights.abs().max() > 1e8


def test_copied_gradient_is_restored_bit_for_bit(backend: TorchTraining, supervised: Supervised) -> None:
    nothing = backend.copy_gradient("m")
    one_pass(backend, supervised([5]))
    some = backend.copy_gradient("m")
    one_pass(backend, supervised([9]))
    backend.put_gradient("m", some)
    again = TorchTraining(backend._folder)
    again.create("m", LoraSpec(rank=4))
    one_pass(again, supervised([5]))
    ours, theirs = (each.adapters["m"].gradient for each in (backend, again))
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    backend.put_gradient("m", nothing)
    assert backend.optim_step("m", AdamParams())["grad_norm:mean"] == 0


def test_weight_decay_is_independent_per_model(backend: TorchTraining, supervised: Supervised) -> None:
    backend.create("other", LoraSpec(rank=4))
    one_pass(backend, supervised([5]), "other")
    before = backend.adapters["m"].weights.clone()
    backend.optim_step("other", AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert torch.equal(backend.adapters["m"].weights, before)
    assert not torch.equal(backend.adapters["other"].weights, before)
