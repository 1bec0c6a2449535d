"""Optimizer steps of a worker against AdamW, clipping and schedules written out here, on one rank and on two."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.config import OptimizerConfig, SkyRLConfig
from skyrl_train.training_backends.base import ParallelInfo
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, Worker

NUM_STEPS = 6
GRADIENT_NORMS = (1.0, 0.01, 20.0, 0.1, 3.0, 0.3)
"""Approximate gradient norm of each step, alternately above and below `max_grad_norm`, so that clipping changes Adam's
averages."""

SETTINGS: dict[str, Any] = dict(
    lr=1e-2,
    adam_betas=[0.9, 0.999],
    weight_decay=0.01,
    max_grad_norm=1.0,
    num_warmup_steps=0,
    scheduler="constant_with_warmup",
)
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "lr": dict(lr=3e-3),
    "betas": dict(adam_betas=[0.7, 0.9]),
    "decay of every weight": dict(weight_decay=0.5),
    "no decay": dict(weight_decay=0.0),
    "clipping of most steps": dict(max_grad_norm=0.05),
    "no clipping": dict(max_grad_norm=math.inf),
    "warm-up": dict(num_warmup_steps=4),
    **{
        f"{name} after 2 steps": dict(scheduler=name, num_warmup_steps=2)
        for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant")
    },
    "inverse_sqrt": dict(scheduler="inverse_sqrt"),
}
EVERYTHING = dict(
    lr=3e-3, adam_betas=[0.7, 0.9], weight_decay=0.5, max_grad_norm=0.05, num_warmup_steps=2, scheduler="cosine"
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("policy", changes) for name, changes in CHANGES.items()},
    "adapters": ("adapters", EVERYTHING),
    "critic": ("critic", EVERYTHING),
}
"""Trained model of each case, and its changes of `SETTINGS`."""


def learning_rate(step: int, lr: float, scheduler: str, num_warmup: int) -> float:
    """The learning rate of a step (0, 1, ...) of a run of `NUM_STEPS`."""
    if scheduler == "constant":
        return lr
    if step < num_warmup:
        return lr * step / num_warmup
    done = (step - num_warmup) / (NUM_STEPS - num_warmup)
    match scheduler:
        case "constant_with_warmup":
            return lr
        case "linear":
            return lr * (1 - done)
        case "cosine" | "cosine_with_restarts":  # one cycle: there is nothing to restart
            return lr * (1 + math.cos(math.pi * done)) / 2
        case "polynomial":  # of degree 1, down to 1e-7
            return 1e-7 + (lr - 1e-7) * (1 - done)
        case "inverse_sqrt":
            timescale = num_warmup or 10_000
            return lr * math.sqrt(timescale / (step - num_warmup + timescale))
    raise ValueError(scheduler)


@dataclass
class ReferenceAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101, algorithm 2) in float64 with gradients clipped by their global norm:

    g <- g min(1, max_norm / |g|)
    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
    w <- w - lr weight_decay w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    """

    weights: dict[str, torch.Tensor]
    """This rank's parts of them."""

    settings: dict[str, Any]
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    variance: dict[str, torch.Tensor] = field(default_factory=dict)
    num_steps: int = 0
    eps: float = 1e-8

    def step(self, gradients: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Take one step. Returns: the norm before clipping and the learning rate."""
        settings = self.settings
        lr = learning_rate(self.num_steps, settings["lr"], settings["scheduler"], settings["num_warmup_steps"])
        square = torch.tensor(sum(float(g.double().square().sum()) for g in gradients.values()), dtype=torch.float64)
        dist.all_reduce(square)  # over the ranks, which hold disjoint parts
        norm = math.sqrt(square)
        self.num_steps += 1
        beta1, beta2 = settings["adam_betas"]
        for name, gradient in gradients.items():
            g = gradient.double() * min(1.0, settings["max_grad_norm"] / norm)
            self.mean[name] = m = beta1 * self.mean.get(name, 0.0) + (1 - beta1) * g
            self.variance[name] = v = beta2 * self.variance.get(name, 0.0) + (1 - beta2) * g.square()
            m_unbiased, v_unbiased = m / (1 - beta1**self.num_steps), v / (1 - beta2**self.num_steps)
            w = self.weights[name]
            self.weights[name] = (
                w - lr * settings["weight_decay"] * w - lr * m_unbiased / (v_unbiased.sqrt() + self.eps)
            )
        return norm, lr


def loaded(kind: str, path: str) -> Worker:
    """A worker with its model, in the process group that this process is in."""
    lora = {"rank": 4} if kind == "adapters" else {}
    section = {"model": {"path": path, "lora": lora}}
    name = "critic" if kind == "critic" else "policy"
    cfg = SkyRLConfig.from_dict({"trainer": {name: section, "bf16": False, "algorithm": {"use_kl_loss": False}}})
    worker: Worker = CriticWorker(cfg, NUM_STEPS)
    if kind != "critic":
        worker = PolicyWorker(cfg, PolicyLossRegistry.get("cross_entropy"), NUM_STEPS)
    worker.backend.parallel = ParallelInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    worker.backend.load_model()
    return worker


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part. Everything but the norm is elementwise, so that parts can be compared one by one."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def give_gradients(
    trained: dict[str, nn.Parameter], norm: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Random gradients of about this norm in place of those of a backward. Returns: this rank's parts."""
    num_weights = sum(weight.numel() for weight in trained.values())
    gradients = {}
    for name, weight in trained.items():
        assert isinstance(weight, DTensor)
        part = torch.randn(weight.to_local().shape, generator=generator) * norm / math.sqrt(num_weights)
        weight.grad = DTensor.from_local(
            part, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
        gradients[name] = part.clone()  # clipping scales the other one
    return gradients


def compare_with_reference(worker: Worker, changes: dict[str, Any]) -> None:
    """Begin the optimizer anew on one rank, take steps, and let the reference follow.

    Raises:
        AssertionError: they part.
    """
    settings = SETTINGS | changes
    vars(worker.backend.settings)["optimizer_config"] = OptimizerConfig(**settings)
    worker.backend.begin_optimizer()
    frozen = {name: own(w) for name, w in worker.backend.model.named_parameters() if not w.requires_grad}
    trained = {name: w for name, w in worker.backend.model.named_parameters() if w.requires_grad}
    reference = ReferenceAdamW({name: own(weight).double() for name, weight in trained.items()}, settings)
    generator = torch.Generator().manual_seed(worker.parallel.rank)
    for gradient_norm in GRADIENT_NORMS:
        gradients = give_gradients(trained, gradient_norm, generator)
        metrics = worker.optim_step()
        norm, lr = reference.step(gradients)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics[f"{worker.name}_lr"] == pytest.approx(lr, rel=1e-6)
        for name, weight in trained.items():
            torch.testing.assert_close(
                own(weight).double(), reference.weights[name], rtol=1e-6, atol=1e-4 * settings["lr"], msg=name
            )
    for name, weight in worker.backend.model.named_parameters():
        assert name in trained or torch.equal(own(weight), frozen[name]), name


def failures_of_cases(path: str) -> dict[str, str]:
    """Return on one rank the cases that fail, with the reason."""
    workers = {kind: loaded(kind, path) for kind in ("policy", "adapters", "critic")}
    failures = {}
    for name, (kind, changes) in CASES.items():
        try:
            compare_with_reference(workers[kind], changes)
        except AssertionError as error:
            failures[name] = str(error)
    return failures


@pytest.fixture(scope="module")
def workers(tiny_model: str, group_of_one: None) -> Callable[[str], Worker]:
    """Workers by kind, each the only rank of its model."""
    return cache(partial(loaded, path=tiny_model))


@pytest.mark.first_case
@pytest.mark.parametrize("name", CASES)
def test_optimizer_step_is_adamw_with_clipping_and_schedule(workers: Callable[[str], Worker], name: str) -> None:
    kind, changes = CASES[name]
    compare_with_reference(workers(kind), changes)


def test_optimizer_step_on_two_ranks_is_adamw_with_clipping_and_schedule(run_on_ranks: Any, tiny_model: str) -> None:
    """All cases in one pair of processes, whose start takes longer than these."""
    assert run_on_ranks(2, failures_of_cases, tiny_model) == [{}, {}]


@pytest.mark.parametrize(
    "kind, names",
    [
        ("policy", ["embed_tokens.weight", "norm.weight", "input_layernorm.weight", "q_proj.weight"]),
        ("adapters", ["lora_A.default.weight", "lora_B.default.weight"]),
        ("critic", ["value_head.weight", "norm.weight"]),
    ],
)
def test_weight_decay_applies_to_all_trained_weights(workers: Any, kind: str, names: list[str]) -> None:
    worker = workers(kind)
    vars(worker.backend.settings)["optimizer_config"] = OptimizerConfig(lr=0.1, weight_decay=0.5)
    worker.backend.begin_optimizer()
    before = {name: own(weight) for name, weight in worker.backend.model.named_parameters()}
    for weight in worker.backend.model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    worker.optim_step()
    for name, weight in worker.backend.model.named_parameters():
        factor = 1 - 0.1 * 0.5 if weight.requires_grad else 1.0
        torch.testing.assert_close(own(weight), before[name] * factor)
    for name in names:
        assert any(
            full_name.endswith(name) and w.requires_grad for full_name, w in worker.backend.model.named_parameters()
        )
