"""The losses, by numbers one can check by hand, and what their gradients are for."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tx.tinker.backends.torch.losses import LOSSES, collect_loss_inputs
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import Datum, LoraSpec, PassOutput, TrainingPass
from tx.tinker.wire.losses import LOSS_RULES

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]

CPU = torch.device("cpu")
E = math.e


def of_one(loss: str, log_prob: float, config: dict[str, float] | None = None, **inputs: float) -> tuple[float, float]:
    """Loss and gradient of a single target."""
    arrays = {name: np.array([value], np.float32) for name, value in inputs.items()}
    data = [Datum(np.array([1]), {"target_tokens": np.array([1]), **arrays})]
    log_probs = torch.tensor([log_prob], requires_grad=True)
    losses, metrics = LOSSES[loss](log_probs, collect_loss_inputs(loss, data, config or {}, CPU))
    assert all(name.rpartition(":")[2] in ("sum", "mean", "min", "max") for name in metrics)
    losses.sum().backward()
    assert log_probs.grad is not None
    return losses.item(), log_probs.grad.item()


def test_every_protocol_loss_exists() -> None:
    assert set(LOSSES) == set(LOSS_RULES)


@pytest.mark.parametrize(
    "weights, loss, gradient",
    [({}, 2.0, -1.0), ({"weights": 1.0}, 2.0, -1.0), ({"weights": 0.0}, 0.0, 0.0), ({"weights": -3.0}, -6.0, 3.0)],
)
def test_cross_entropy(weights: dict[str, float], loss: float, gradient: float) -> None:
    assert of_one("cross_entropy", -2.0, **weights) == (loss, gradient)


@pytest.mark.parametrize("lp, q, advantage", [(-1.0, -1.0, 2.0), (-1.0, -2.0, 1.0), (-3.0, -1.0, -1.0)])
def test_importance_sampling_is_ratio_times_advantage(lp: float, q: float, advantage: float) -> None:
    expected = -math.exp(lp - q) * advantage
    assert of_one("importance_sampling", lp, logprobs=q, advantages=advantage) == pytest.approx((expected, expected))


LOG2 = math.log(2)


@pytest.mark.parametrize(
    "log_ratio, advantage, config, loss, gradient",
    [
        (0.0, 1.0, {}, -1.0, -1.0),  # on policy: the plain policy gradient
        (LOG2, 1.0, {}, -1.2, 0.0),  # already made much likelier: clipped, so no further push
        (-LOG2, 1.0, {}, -0.5, -0.5),  # made less likely by mistake: it may recover
        (-LOG2, -1.0, {}, 0.8, 0.0),  # already made much less likely: clipped
        (LOG2, -1.0, {}, 2.0, 2.0),  # a bad token got likelier: full penalty
        (LOG2, 1.0, {"clip_high_threshold": 3.0}, -2.0, -2.0),  # bounds are ratios, not distances from 1
        (-LOG2, -1.0, {"clip_low_threshold": 0.4}, 0.5, 0.5),
    ],
)
def test_ppo_and_gspo_single_target(
    log_ratio: float, advantage: float, config: dict[str, float], loss: float, gradient: float
) -> None:
    inputs = {"logprobs": -1.0 - log_ratio, "advantages": advantage}
    expected = pytest.approx((loss, gradient), abs=1e-6)
    assert of_one("ppo", -1.0, config, **inputs) == expected
    assert of_one("gspo", -1.0, config, **inputs, sequence_ratio_mask=1.0) == expected


@pytest.mark.parametrize(
    "log_ratio, config, weight",
    [(0.0, {}, 1.0), (LOG2, {}, 2.0), (3 * LOG2, {}, 4.0), (-LOG2, {"clip_low_threshold": 0.8}, 0.8)],
)
def test_cispo_clips_weight_and_keeps_gradient(log_ratio: float, config: dict[str, float], weight: float) -> None:
    result = of_one("cispo", -1.0, config, logprobs=-1.0 - log_ratio, advantages=3.0)
    assert result == pytest.approx((weight * 3, -weight * 3))


@pytest.mark.parametrize("config, beta", [({}, 0.05), ({"beta": 0.5}, 0.5)])
def test_dro_pulls_toward_sampling_policy(config: dict[str, float], beta: float) -> None:
    result = of_one("dro", -1.0, config, logprobs=-3.0, advantages=0.5)
    assert result == pytest.approx((0.5 + beta / 2 * 4, -0.5 + beta * 2))


def test_per_target_bounds_override_request() -> None:
    inputs = {"logprobs": -1.0 - LOG2, "advantages": 1.0, "clip_low_threshold": 0.0, "clip_high_threshold": 1.5}
    assert of_one("ppo", -1.0, {"clip_high_threshold": 9.0}, **inputs)[0] == pytest.approx(-1.5)


def test_overflowing_ratio_leaves_finite_gradient() -> None:
    assert of_one("ppo", 0.0, logprobs=-1000.0, advantages=1.0) == pytest.approx((-1.2, 0.0))


def test_gspo_uses_single_ratio_per_datum_over_masked_targets() -> None:
    def datum(q: list[float], mask: list[float]) -> Datum:
        ids = np.arange(len(q))
        arrays = {"logprobs": q, "advantages": [1.0] * len(q), "sequence_ratio_mask": mask}
        return Datum(ids, {"target_tokens": ids, **{k: np.array(v, np.float32) for k, v in arrays.items()}})

    data = [datum([-1.1, -9.0, -0.9], [1, 0, 1]), datum([-1.1, -1.1], [1, 1]), datum([-5.0], [0])]
    log_probs = torch.full((6,), -1.0, requires_grad=True)
    losses, _ = LOSSES["gspo"](log_probs, collect_loss_inputs("gspo", data, {}, CPU))
    expected = [-1.0] * 3 + [-math.exp(0.1)] * 2 + [-1.0]  # means of 0.1 and -0.1; of 0.1 twice; of nothing
    torch.testing.assert_close(losses.detach(), torch.tensor(expected))
    losses.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected))  # a ratio's own gradient is itself


def test_loss_is_plain_sum_over_data(model_folder: Make, supervised: Supervised) -> None:
    """Twice the data is twice the loss and gradient, however it is cut."""
    data, gradients, losses = supervised([7, 20, 3]), [], []
    for passes in ([data], [data + data], [data[:1], data[1:]]):
        backend = TorchTraining(model_folder("llama"))
        backend.create("m", LoraSpec(rank=4))
        results = [backend.run([TrainingPass("m", each, "cross_entropy")])[0] for each in passes]
        losses.append(sum(result.metrics["loss:sum"] for result in results if isinstance(result, PassOutput)))
        gradients.append(backend.adapters["m"].gradient)
    torch.testing.assert_close(gradients[1], 2 * gradients[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-4, atol=1e-4)
    assert losses == pytest.approx([losses[0], 2 * losses[0], losses[0]])


def test_custom_client_loss_has_torch_gradient(model_folder: Make, supervised: Supervised) -> None:
    """forward, the client's loss and its gradient g, then cross-entropy with weights -g: against the loss itself, built
    into the backend."""

    def pairwise(log_probs: torch.Tensor, _inputs: object = None) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.nn.functional.logsigmoid(0.3 * (log_probs[:9].sum() - log_probs[9:].sum()))[None], {}

    data = [Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"]}) for d in supervised([9, 14])]
    backend = TorchTraining(model_folder("qwen3"))
    for model_id in ("client", "server"):
        backend.create(model_id, LoraSpec(rank=4, seed=1))
    (seen,) = backend.run([TrainingPass("client", data, "cross_entropy", forward_only=True)])
    assert isinstance(seen, PassOutput)
    log_probs = torch.from_numpy(np.concatenate(seen.logprobs)).requires_grad_()
    pairwise(log_probs)[0].backward()
    assert log_probs.grad is not None
    weights = np.split(-log_probs.grad.numpy(), [9])
    weighted = [Datum(d.tokens, {**d.inputs, "weights": w}) for d, w in zip(data, weights, strict=True)]
    backend.run([TrainingPass("client", weighted, "cross_entropy")])
    plain = LOSSES["cross_entropy"]
    LOSSES["cross_entropy"] = pairwise
    try:
        backend.run([TrainingPass("server", data, "cross_entropy")])
    finally:
        LOSSES["cross_entropy"] = plain
    a, b = (backend.adapters[model_id].gradient for model_id in ("client", "server"))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
