"""Invariances of a training backend: an optimizer step on a tiny policy must not depend on how its work is divided.

Looks through the interface alone (`TrainingBackend`), so that it fits any way to hold a model.
Shapes: B rows, T columns (prompts padded on the left, responses on the right), R response columns.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.config import SkyRLConfig
from skyrl_train.models.build import build_model
from skyrl_train.models.experts import RouterStatistics
from skyrl_train.training_backends.base import (
    MakeBackend,
    MetricSums,
    ModelName,
    RankInfo,
    Scores,
    Step,
    TrainingBackend,
)
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.workers.objectives.critic import CriticObjective
from skyrl_train.workers.objectives.policy import PolicyObjective
from skyrl_train_testing.findings import Findings

NUM_ROWS, NUM_PROMPT, NUM_RESPONSE = 7, 20, 6
NUM_STEPS = 8


@dataclass(frozen=True)
class StepOutcome:
    """Observable results of one optimizer step."""

    sums: MetricSums
    step: Step
    outputs: torch.Tensor
    """Log-probs [B, R] before the step."""

    weights: dict[str, torch.Tensor]
    """Weights after the step."""

    router: RouterStatistics | None
    """Use of the experts by this rank's part."""


def check_training_backend(
    make: MakeBackend,
    model_path: str,
    *,
    settings: Mapping[str, Any] | None = None,
    exempt: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> None:
    """Compare optimizer steps on one rank in this process, divided in many ways.

    Args:
        make: makes a backend that has neither joined nor loaded: a subclass of `TrainingBackend`, or a function.
        model_path: a small model's folder.
        settings: of `trainer`, merged by section into the check's settings.
        exempt: invariances that do not apply to this backend, each with the reason.
        device: `trainer.placement.device`, `cpu` or `cuda`.

    Raises:
        InvarianceError: lists all violations with numbers.
    """
    findings = Findings(f"the training backend {getattr(make, '__name__', make)!s}", exempt)
    cfg = make_settings(model_path, settings or {}, device=device)
    backend = make(cfg, "policy", NUM_STEPS)
    was_in_group = dist.is_initialized()
    backend.join(RankInfo(device=device))
    try:
        backend.load_model()
        _check_all(findings, backend, model_path)
    finally:
        if dist.is_initialized() and not was_in_group:
            dist.destroy_process_group()
    findings.finish()


def _check_all(findings: Findings, backend: TrainingBackend, model_path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not findings.are_exempt("agreement"):
            _check_scores(findings, backend, model_path)
        if not findings.are_exempt("micro_batches", "row_order", "masked_garbage"):
            _check_divisions(findings, backend)
        if not findings.are_exempt("agreement", "skipped_update", "forgotten_gradient"):
            _check_updates(findings, backend)
        if not findings.are_exempt("deterministic"):
            _check_files(findings, backend, Path(folder))


def make_settings(
    model_path: str, settings: Mapping[str, Any], name: ModelName = "policy", device: str = "cpu"
) -> SkyRLConfig:
    """Return float32 settings with gradients clipped at about a third of their norm, updated by section with the given
    ones.
    """
    optimizer = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, "scheduler": "linear"}
    model = {"model": {"path": model_path}}
    trainer = {
        "policy": model,
        name: model if name == "ref" else {**model, "optimizer_config": optimizer},
        "placement": {"device": device},
        "bf16": False,
        "gradient_checkpointing": False,
        "algorithm": {"use_kl_loss": False},
    }
    sampling = {"sampling_params": {"temperature": 0.7}}
    return SkyRLConfig.from_dict({"trainer": _merge(trainer, settings), "generator": sampling})


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings by section; `second` takes precedence."""
    merged = dict(first)
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


def make_backend_batch(num_words: int = 64) -> TrainingInputBatch:
    """Make rows of 1 to 20 prompt tokens and 1 to 6 response tokens, some of them observations of an environment. Two
    pairs of rows have a long prompt in common, which is computed once where both are in a micro-batch. Token 0, the
    padding token (`padding_idx` of many models), also occurs in a prompt and a response.
    """
    draw = torch.Generator().manual_seed(0)
    num_prompt = torch.tensor([20, 20, 3, 18, 18, 5, 1])
    num_response = torch.tensor([6, 4, 1, 6, 3, 2, 5])
    columns = torch.arange(-NUM_PROMPT, NUM_RESPONSE)
    mask = (columns >= -num_prompt[:, None]) & (columns < num_response[:, None])
    loss_mask = mask[:, NUM_PROMPT:].float()
    loss_mask[0, 2] = loss_mask[3, 1] = 0
    weights = token_weights(loss_mask, "token_mean")
    sequences = torch.where(mask, torch.randint(2, num_words, mask.shape, generator=draw), 0)
    sequences[0, 1] = sequences[3, NUM_PROMPT + 2] = 0
    for row in (0, 3):
        sequences[row + 1, :NUM_PROMPT] = sequences[row, :NUM_PROMPT]
    batch = TrainingInputBatch(
        sequences=sequences,
        attention_mask=mask.long(),
        loss_mask=loss_mask,
        loss_weights=weights,
        critic_loss_weights=weights,
        values=torch.zeros_like(loss_mask),
        advantages=torch.randn(loss_mask.shape, generator=draw),
        later_advantages=3 * torch.randn(loss_mask.shape, generator=draw),
        metadata={"response_length": NUM_RESPONSE},
    )
    return add_advantages(batch, batch.tensor("advantages"))


def add_advantages(batch: TrainingInputBatch, advantages: torch.Tensor) -> TrainingInputBatch:
    """Return the batch with other advantages [B, R], which are the returns of a critic too."""
    return TrainingInputBatch({**batch, "advantages": advantages, "returns": advantages}, metadata=batch.metadata)


def run_step(
    backend: TrainingBackend,
    batch: TrainingInputBatch,
    micro_batches: Sequence[MicroBatch] | None = None,
    *,
    gather: bool = True,
) -> StepOutcome:
    """Take one optimizer step of the plain policy gradient, or of the critic. Args: `gather`, False for an outcome
    without weights."""
    algorithm = backend.cfg.trainer.algorithm
    is_critic = backend.name == "critic"
    objective = (
        CriticObjective(algorithm) if is_critic else PolicyObjective(algorithm, PolicyLossRegistry.get("regular"))
    )
    micro_batches = micro_batches or [MicroBatch(tuple(range(len(batch))))]
    gradient = backend.forward_backward(batch, micro_batches, objective)
    step = backend.optimizer_step()
    parameters = backend.gather_parameters() if gather else ()
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in parameters}
    return StepOutcome(gradient.sums, step, gradient.outputs, weights, gradient.router)


# ---- the checks


def _check_scores(findings: Findings, backend: TrainingBackend, model_path: str) -> None:
    """Check that log-probs, gradient norm and parameter names equal the model without a backend."""
    batch = make_backend_batch()
    plain = build_model(backend.cfg, "policy", model_path, device=torch.device("cpu"), is_trained=True)
    inputs = batch.tensor("sequences"), batch.tensor("attention_mask"), NUM_RESPONSE
    scores = plain(*inputs, backend.cfg.generator.sampling_params.temperature, with_entropy=True)
    objective = PolicyObjective(backend.cfg.trainer.algorithm, PolicyLossRegistry.get("regular"))
    loss, _ = objective(Scores(scores.log_probs, scores.entropy), batch)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    kept = batch.tensor("attention_mask")[:, -NUM_RESPONSE:] != 0
    with findings.attempt("agreement", "a forward and backward"):
        forwarded = backend.forward(batch, [MicroBatch(tuple(range(NUM_ROWS)))])
        findings.compare("agreement", "without a backend", "the log-prob", scores.log_probs, forwarded, kept)
        held = dict(backend.gather_parameters())
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        for name, expected in model.named_parameters():
            if name not in held:
                findings.add("agreement", f"gather_parameters() lacks {name}")
            else:
                got = held[name].cpu()
                findings.compare("agreement", "when loaded", name, expected, got, relative=0.0, absolute=0.0)
        got = torch.tensor(run_step(backend, batch).step.grad_norm)
        findings.compare(
            "agreement", "without a backend", "the gradient's norm", norm, got, absolute=1e-4 * norm.item()
        )


def _check_divisions(findings: Findings, backend: TrainingBackend) -> None:
    """Two steps (AdamW's first has the size of the learning rate, whatever the gradient's) in every division."""
    batch = make_backend_batch()
    rows = tuple(range(NUM_ROWS))
    expected = _run_two_steps(backend, batch, [MicroBatch(rows)])
    for size in (1, 2, 4):
        parts = [MicroBatch(rows[start : start + size]) for start in range(0, NUM_ROWS, size)]
        _compare(findings, "micro_batches", f"in micro-batches of {size}", backend, batch, parts, expected)
    parts = [MicroBatch(rows[:4]), MicroBatch(rows[4:]), MicroBatch(rows[:2], is_dummy=True)]
    _compare(findings, "micro_batches", "with a dummy micro-batch", backend, batch, parts, expected)
    order = torch.tensor([3, 6, 0, 5, 2, 4, 1])
    with findings.attempt("row_order", "with the rows shuffled"):
        found = _run_two_steps(backend, batch.rows(order), [MicroBatch(rows)])
        _compare_outcomes(findings, "row_order", "with the rows shuffled", expected, found, order.argsort())
    masked = torch.where(batch.tensor("loss_mask") != 0, batch.tensor("advantages"), math.nan)
    garbage = add_advantages(batch, masked)
    parts = [MicroBatch(rows)]
    _compare(findings, "masked_garbage", "with NaN where the mask is 0", backend, garbage, parts, expected)


def _check_updates(findings: Findings, backend: TrainingBackend) -> None:
    """Check that gradients are cleared, and that neither a non-finite gradient nor offloading changes weights."""
    batch = make_backend_batch()
    backend.load_model()
    before = run_step(backend, batch)
    broken = add_advantages(batch, batch.tensor("advantages") * math.nan)
    with findings.attempt("skipped_update", "with a gradient of NaN"):
        skipped = run_step(backend, broken)
        if not skipped.step.is_skipped:
            findings.add("skipped_update", "a step with a gradient of NaN says that it was taken")
        for name, weight in before.weights.items():
            findings.compare("skipped_update", "after it", name, weight, skipped.weights[name])
    with findings.attempt("forgotten_gradient", "a step after another"):
        backend.offload()
        backend.onload()
        after = run_step(backend, batch)
        largest = 2 * before.step.grad_norm
        if not 0 < after.step.grad_norm < largest:
            text = f"the gradient's norm is {after.step.grad_norm:.4g}, and was {before.step.grad_norm:.4g}"
            findings.add("forgotten_gradient", f"two steps later {text}")
        lr = backend.trained_settings.optimizer_config.lr
        wanted = torch.tensor([lr * (1 - step / NUM_STEPS) for step in range(3)])
        rates = torch.tensor([outcome.step.learning_rate for outcome in (before, skipped, after)])
        findings.compare("agreement", "of a linear schedule", "the learning rate", wanted, rates)


def _check_files(findings: Findings, backend: TrainingBackend, folder: Path) -> None:
    """Check that a resumed run has the same bits."""
    batch = make_backend_batch()
    with findings.attempt("deterministic", "resumed from its checkpoint"):
        backend.load_model()
        run_step(backend, batch)
        backend.save(folder)
        expected = run_step(backend, batch)
        backend.load_model()
        backend.load(folder)
        found = run_step(backend, batch)
        for name, weight in expected.weights.items():
            got = found.weights[name]
            findings.compare("deterministic", "from its checkpoint", name, weight, got, relative=0.0, absolute=0.0)


def _run_two_steps(
    backend: TrainingBackend, batch: TrainingInputBatch, parts: Sequence[MicroBatch]
) -> tuple[StepOutcome, StepOutcome]:
    backend.load_model()
    other = add_advantages(batch, batch.tensor("later_advantages"))
    return run_step(backend, batch, parts), run_step(backend, other, parts)


def _compare(
    findings: Findings,
    invariance: str,
    words: str,
    backend: TrainingBackend,
    batch: TrainingInputBatch,
    parts: Sequence[MicroBatch],
    expected: tuple[StepOutcome, StepOutcome],
) -> None:
    with findings.attempt(invariance, words):
        _compare_outcomes(findings, invariance, words, expected, _run_two_steps(backend, batch, parts))


def _compare_outcomes(
    findings: Findings,
    invariance: str,
    words: str,
    expected: tuple[StepOutcome, StepOutcome],
    found: tuple[StepOutcome, StepOutcome],
    order: torch.Tensor | None = None,
) -> None:
    for number, (first, second) in enumerate(zip(expected, found, strict=True), start=1):
        place = f"{words}, step {number}"
        norms = torch.tensor(first.step.grad_norm), torch.tensor(second.step.grad_norm)
        findings.compare(invariance, place, "the gradient's norm", *norms, relative=1e-4)
        for name, value in first.sums.items():
            got = torch.tensor(second.sums[name])
            findings.compare(invariance, place, name, torch.tensor(value), got, relative=1e-4, absolute=1e-5)
        outputs = second.outputs if order is None else second.outputs[order]
        findings.compare(invariance, place, "the log-prob", first.outputs, outputs, relative=1e-4, absolute=1e-4)
        # Adam divides by the gradient's size: where that is tiny, rounding decides. Its mean over a tensor does not.
        for name, weight in first.weights.items():
            difference = (second.weights[name] - weight).abs().mean()
            findings.compare(invariance, place, f"mean change of {name}", torch.zeros(()), difference, absolute=2e-5)
