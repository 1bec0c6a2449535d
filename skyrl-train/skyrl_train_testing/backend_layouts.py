"""Layouts of a training backend, each compared with one FSDP2 rank.

    check_layout(BackendRanks(folder), model_path, Layout(2, {"strategy": "megatron", ...}))
    check_layout(ranks, model_path, Layout(2, {"bf16": True}), tolerance=BFLOAT16)
    check_layout(ranks, model_path, Layout(2, model="critic", micro_batch_size=1))

Each rank is a process. Shapes: B rows, R response columns.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.models.persistent_buffers import iter_persistent_buffers
from skyrl_train.training_backends.base import (
    MakeBackend,
    MetricSums,
    ModelName,
    ParallelInfo,
    RankInfo,
    Step,
    TrainingBackend,
    merge_metric_sums,
)
from skyrl_train.training_batch import MicroBatch
from skyrl_train_testing.backend_checks import NUM_STEPS, add_advantages, make_backend_batch, make_settings, run_step
from skyrl_train_testing.findings import Findings
from skyrl_train_testing.rank_processes import ForkedRanks

T = TypeVar("T")
_SECONDS = 240.0
_NUM_COMPARED_STEPS = 3


@dataclass(frozen=True)
class Layout:
    """Division of a model over ranks, and of its work into micro-batches.

    Args:
        trainer: settings of `trainer`, including `strategy`; sections are merged with the check's settings.
        make_backend: factory of an unregistered backend.
        model: the reference is scored alone.
        num_dummies: micro-batches of weight 0 after the largest number of a data-parallel rank.
        device: of every rank; nccl takes one rank on a GPU.
    """

    num_ranks: int = 1
    trainer: Mapping[str, Any] = field(default_factory=dict)
    make_backend: MakeBackend | None = None
    model: ModelName = "policy"
    micro_batch_size: int = 2
    num_dummies: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        return f"the {self.model} on {self.num_ranks} ranks with {dict(self.trainer)}"

    def cfg(self, model_path: str) -> SkyRLConfig:
        """Return the settings of a run with the model in a folder."""
        # A small learning rate: Adam divides by the size of gradients, and where they are tiny rounding decides.
        cfg = make_settings(model_path, self.trainer, self.model, self.device)
        if self.model != "ref":
            optimizer = getattr(cfg.trainer, self.model).optimizer_config
            optimizer.lr, optimizer.max_grad_norm = 1e-4, 0.5
        return cfg

    @property
    def reference(self) -> "Layout":
        """One FSDP2 rank that holds the same model, with the same adapters, in float32."""
        model = self.trainer.get(self.model, {}).get("model", {})
        return Layout(trainer={self.model: {"model": model}} if model else {}, model=self.model)

    def divide(self, backend: TrainingBackend) -> tuple[torch.Tensor, list[MicroBatch]]:
        """Return this data-parallel rank's rows of the batch and its micro-batches, padded to the largest number of a
        rank plus dummies.
        """
        parallel, size = backend.parallel, self.micro_batch_size
        by_rank = torch.arange(len(make_backend_batch())).tensor_split(parallel.data_parallel_size)
        rows = by_rank[parallel.data_parallel_rank]
        parts = [MicroBatch(tuple(range(len(rows)))[start : start + size]) for start in range(0, len(rows), size)]
        most = max(-(-len(own) // size) for own in by_rank) + self.num_dummies
        return rows, parts + [MicroBatch((0,), is_dummy=True)] * (most - len(parts))


@dataclass(frozen=True)
class Tolerance:
    """Largest differences from one FSDP2 rank in float32."""

    scores: float = 1e-5
    """Difference of log-probs, values, losses and norms: absolute, and relative to each."""

    weights: float = 1e-5
    """Difference of a weight after three steps of a learning rate that begins at 1e-4."""

    mean_weights: float = 1e-5
    """Mean difference of the weights of one parameter."""

    loaded: float = 0.0
    """Difference of a weight before training."""


FLOAT32 = Tolerance()
BFLOAT16 = Tolerance(scores=0.05, weights=5e-4, mean_weights=5e-5)
"""Products and activations in bfloat16, with float32 weights in the optimizer. (Adam moves a weight by up to the sum of
the learning rates, 2.6e-4, in whichever direction a rounded gradient points: where it is nearly 0, in the other.)"""


@dataclass(frozen=True)
class TrainingOutcome:
    """Observations of one rank about a short training, in the order in which they were made."""

    sums: list[MetricSums]
    """Metrics of each step, this rank's part."""

    steps: list[Step]
    trained: dict[str, torch.Tensor]
    """Parameters after the compared steps (rank 0)."""

    skipped: Step
    """Outcome of a step with a gradient of NaN."""

    after_skipped: dict[str, torch.Tensor]
    next: dict[str, torch.Tensor]
    """Parameters after one more step, from the state that was saved."""

    resumed: dict[str, torch.Tensor]
    """Parameters after that step, from the checkpoint in a new model."""

    resumed_reference: dict[str, torch.Tensor]
    """Parameters after that step, from the checkpoint of one FSDP2 rank."""


@dataclass(frozen=True)
class RankOutcome:
    """Observations of one rank about a model."""

    parallel: ParallelInfo
    rows: torch.Tensor
    """Rows of the batch that this rank computed."""

    scores: torch.Tensor
    """[len(rows), R] before training: log-probs, or the critic's values."""

    prompt_log_probs: torch.Tensor
    """Empty for a critic."""

    loaded: dict[str, torch.Tensor]
    """Parameters as loaded (rank 0; elsewhere empty)."""

    for_engines: dict[str, torch.Tensor]
    """Parameters as loaded, in bfloat16."""

    training: TrainingOutcome | None
    """None for a model that is not trained."""


class BackendRanks:
    """Processes that hold one layout of a model each time: torch keeps names of process groups beyond their end.

    Args:
        folder: of their logs, and of the checkpoints that other layouts resume.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._references: dict[str, tuple[RankOutcome, Path]] = {}

    def run(self, layout: Layout, model_path: str, job: Callable[..., T], *args: Any) -> list[T]:
        """Run `job(backend, *args)` on every rank of a layout, the model loaded. Returns: the answers in rank order."""
        ranks = ForkedRanks("backend", _Rank, (layout,), num_ranks=layout.num_ranks, log_folder=self._folder)
        common = model_path, find_free_port(), job, args
        calls: list[Any] = [[("run", (rank, *common))] for rank in range(layout.num_ranks)]
        try:
            answers: list[list[Any]] = asyncio.run(ranks.call(calls, _SECONDS, "the deadline of the check"))
            return [answer for [answer] in answers]
        finally:
            ranks.kill()

    def reference(self, layout: Layout, model_path: str) -> tuple[RankOutcome, Path]:
        """Return the outcome of one FSDP2 rank with the same model, computed once, and the folder of its checkpoint."""
        key = f"{model_path} {layout.reference}"
        if key not in self._references:
            folder = self._folder / f"reference_{len(self._references)}"
            [outcome] = self.run(layout.reference, model_path, collect_observation, layout.reference, folder)
            self._references[key] = outcome, folder
        return self._references[key]


class _Rank:
    """One process."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def run(self, rank: int, model_path: str, port: int, job: Callable[..., T], args: Any) -> T:
        cfg, name = self.layout.cfg(model_path), self.layout.model
        make: MakeBackend = self.layout.make_backend or TrainingBackendRegistry.get(cfg.trainer.strategy)
        backend = make(cfg, name, None if name == "ref" else NUM_STEPS)
        info = RankInfo(rank=rank, world_size=self.layout.num_ranks, master_port=port, device=self.layout.device)
        backend.join(info)
        backend.load_model()
        return job(backend, *args)


def collect_observation(
    backend: TrainingBackend, layout: Layout, folder: Path, reference: Path | None = None
) -> RankOutcome:
    """Score the batch; train for a few steps, with uneven and dummy micro-batches, and save and resume the state. A
    job.

    Args:
        folder: of the checkpoint that is written.
        reference: another checkpoint to resume.
    """
    batch = make_backend_batch()
    rows, micro_batches = layout.divide(backend)
    scores = backend.forward(batch.rows(rows), micro_batches)
    prompt_log_probs = torch.empty(0)
    if backend.name != "critic":
        with torch.no_grad():
            prompt_log_probs = backend.prompt_log_probs(batch.tensor("sequences")[:2]).cpu()
    loaded, for_engines = _collect_weights(backend), _collect_weights(backend, torch.bfloat16)
    training = _train(backend, layout, folder, reference) if backend.is_trained else None
    return RankOutcome(backend.parallel, rows, scores, prompt_log_probs, loaded, for_engines, training)


def _train(backend: TrainingBackend, layout: Layout, folder: Path, reference: Path | None) -> TrainingOutcome:
    batch = make_backend_batch()
    rows, micro_batches = layout.divide(backend)
    own = batch.rows(rows)
    later = add_advantages(own, own.tensor("later_advantages"))
    outcomes = [
        run_step(backend, own if step % 2 == 0 else later, micro_batches) for step in range(_NUM_COMPARED_STEPS)
    ]
    # One rank alone has it: all must skip.
    broken = own
    if backend.parallel.data_parallel_rank == 0:
        broken = add_advantages(own, own.tensor("advantages") * torch.nan)
    skipped = run_step(backend, broken, micro_batches)
    backend.offload()
    backend.onload()
    backend.save(folder)
    going_on = run_step(backend, own, micro_batches)
    resumed, resumed_reference = ({} if each is None else resume(backend, layout, each) for each in (folder, reference))
    kept = backend.parallel.rank == 0
    return TrainingOutcome(
        sums=[outcome.sums for outcome in outcomes],
        steps=[outcome.step for outcome in outcomes],
        trained=outcomes[-1].weights if kept else {},
        skipped=skipped.step,
        after_skipped=skipped.weights if kept else {},
        next=going_on.weights if kept else {},
        resumed=resumed,
        resumed_reference=resumed_reference,
    )


def resume(backend: TrainingBackend, layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint into a new model and take the step after it. A job. Returns: the parameters (rank 0; elsewhere
    empty)."""
    backend.load_model()
    rows, micro_batches = layout.divide(backend)
    backend.load(folder)
    outcome = run_step(backend, make_backend_batch().rows(rows), micro_batches)
    return outcome.weights if backend.parallel.rank == 0 else {}


def check_layout(
    ranks: BackendRanks,
    model_path: str,
    layout: Layout,
    *,
    exempt: Mapping[str, str] | None = None,
    tolerance: Tolerance = FLOAT32,
) -> None:
    """Compare a layout with one FSDP2 rank in float32.

    Args:
        exempt: invariances that are not meant to hold, each with the reason.

    Raises:
        InvarianceError: lists all differences with numbers.
    """
    findings = Findings(str(layout), exempt)
    expected, reference = ranks.reference(layout, model_path)
    with TemporaryDirectory() as folder, findings.attempt("agreement", "on these ranks"):
        outcomes = ranks.run(layout, model_path, collect_observation, layout, Path(folder), reference)
        _check_scores(findings, expected, outcomes, tolerance.scores)
        _check_loaded(findings, model_path, expected, outcomes[0], tolerance.loaded)
        if expected.training is not None and outcomes[0].training is not None:
            _check_training(findings, expected.training, outcomes[0].training, tolerance)
            _check_steps(findings, expected.training, outcomes, tolerance.scores)
            [elsewhere] = ranks.run(layout.reference, model_path, resume, layout.reference, Path(folder))
            words = "resumed on one FSDP2 rank"
            _compare_trained(findings, words, outcomes[0].training.next, elsewhere, tolerance)
    findings.finish()


def check_resuming(
    ranks: BackendRanks, model_path: str, layouts: Mapping[str, Layout], *, tolerance: Tolerance = FLOAT32
) -> None:
    """Resume the checkpoint of every layout under every other, and compare the next step with the writing layout.

    Raises:
        InvarianceError: lists all differences with numbers.
    """
    findings = Findings(f"resuming among {', '.join(layouts)}")
    written: dict[str, TrainingOutcome | None] = {}
    with TemporaryDirectory() as folder:
        for name, layout in layouts.items():
            outcome, *_ = ranks.run(layout, model_path, collect_observation, layout, Path(folder, name))
            written[name] = outcome.training
        for name, layout in layouts.items():
            others = [(other, training) for other, training in written.items() if training and other != name]
            folders = [Path(folder, other) for other, _ in others]
            resumed, *_ = ranks.run(layout, model_path, _resume_each, layout, folders)
            for (other, training), weights in zip(others, resumed, strict=True):
                words = f"resumed under {name} from {other}"
                _compare_trained(findings, words, training.next, weights, tolerance)
    findings.finish()


def _resume_each(backend: TrainingBackend, layout: Layout, folders: list[Path]) -> list[dict[str, torch.Tensor]]:
    return [resume(backend, layout, folder) for folder in folders]


def _check_scores(findings: Findings, expected: RankOutcome, outcomes: list[RankOutcome], tolerance: float) -> None:
    kept = make_backend_batch().tensor("attention_mask")[:, -expected.scores.shape[1] :] != 0
    for rank, outcome in enumerate(outcomes):
        if outcome.parallel.holds_outputs:
            words, rows = f"on rank {rank}", outcome.rows
            own = expected.scores[rows], outcome.scores, kept[rows]
            findings.compare("agreement", words, "the score", *own, relative=tolerance, absolute=tolerance)
            pair = expected.prompt_log_probs, outcome.prompt_log_probs
            what = "the log-prob of a prompt"
            findings.compare("agreement", words, what, *pair, relative=tolerance, absolute=tolerance)


def _check_loaded(
    findings: Findings, model_path: str, expected: RankOutcome, outcome: RankOutcome, tolerance: float
) -> None:
    """Compare parameters and buffers with the files, or with one FSDP2 rank if they are missing (a critic's head)."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    buffers = dict(
        iter_persistent_buffers(model)
    )  # sent as they are: a routing bias in bfloat16 would choose other experts
    in_files = {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers
    wanted = {name: in_files.get(name, tensor) for name, tensor in expected.loaded.items()}
    _compare(findings, "agreement", "as loaded", wanted, outcome.loaded, tolerance)
    in_bf16 = {name: tensor if name in buffers else tensor.to(torch.bfloat16) for name, tensor in wanted.items()}
    _compare(findings, "agreement", "as sent to engines in bfloat16", in_bf16, outcome.for_engines, 0.0)


def _check_training(
    findings: Findings, expected: TrainingOutcome, found: TrainingOutcome, tolerance: Tolerance
) -> None:
    """Compare parameters after training, after a skipped step, and after a resume."""
    _compare_trained(findings, "after three steps", expected.trained, found.trained, tolerance)
    _compare(findings, "skipped_update", "after it", found.trained, found.after_skipped, 0.0)
    _compare(findings, "deterministic", "resumed from its checkpoint", found.next, found.resumed, 0.0)
    _compare_trained(findings, "resumed from one FSDP2 rank", expected.next, found.resumed_reference, tolerance)


def _check_steps(findings: Findings, expected: TrainingOutcome, outcomes: list[RankOutcome], tolerance: float) -> None:
    of_ranks = [outcome.training for outcome in outcomes if outcome.training is not None]
    # Ranks that share rows report the same sums: one of each data-parallel rank counts.
    first = {
        outcome.parallel.data_parallel_rank: training
        for outcome, training in reversed(list(zip(outcomes, of_ranks, strict=True)))
        if outcome.parallel.holds_outputs
    }
    for number, (wanted, step) in enumerate(zip(expected.sums, expected.steps, strict=True)):
        words = f"step {number + 1}"
        sums = merge_metric_sums(training.sums[number] for training in first.values())
        for name, value in wanted.items():
            _compare_numbers(findings, words, name, value, sums.get(name, math.nan), tolerance)
        for rank, training in enumerate(of_ranks):
            found, place = training.steps[number], f"{words} on rank {rank}"
            norms, rates = (step.grad_norm, found.grad_norm), (step.learning_rate, found.learning_rate)
            _compare_numbers(findings, place, "the gradient's norm", *norms, tolerance)
            _compare_numbers(findings, place, "the learning rate", *rates)
    for rank, training in enumerate(of_ranks):
        if not training.skipped.is_skipped:
            findings.add("skipped_update", f"rank {rank} says that it took a step with a gradient of NaN")
        if any(step.is_skipped for step in training.steps):
            findings.add("skipped_update", f"rank {rank} skipped a step with a finite gradient")


def _compare_numbers(
    findings: Findings, words: str, what: str, expected: float, found: float, relative: float = 1e-6
) -> None:
    pair = torch.tensor(expected), torch.tensor(found)
    findings.compare("agreement", words, what, *pair, relative=relative, absolute=relative)


def _compare_trained(
    findings: Findings,
    words: str,
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
) -> None:
    _compare(findings, "agreement", words, expected, found, tolerance.weights)
    if tolerance.mean_weights < tolerance.weights:
        means = {name: (found[name] - weight).abs().mean() for name, weight in expected.items() if name in found}
        nothing = {name: torch.zeros(()) for name in means}
        _compare(findings, "agreement", f"{words}, on average", nothing, means, tolerance.mean_weights)


def _compare(
    findings: Findings,
    invariance: str,
    words: str,
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    absolute: float,
) -> None:
    if expected.keys() != found.keys():
        findings.add(invariance, f"{words}, the names of parameters differ: {sorted(expected.keys() ^ found.keys())}")
    for name in expected.keys() & found.keys():
        findings.compare(invariance, words, name, expected[name], found[name], relative=0.0, absolute=absolute)


def _collect_weights(backend: TrainingBackend, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Gather all parameters (on rank 0; elsewhere empty)."""
    gathered = {name: tensor.to("cpu", copy=True) for name, tensor in backend.gather_parameters(dtype)}
    return gathered if backend.parallel.rank == 0 else {}


def run_steps_with_moves(backend: TrainingBackend, layout: Layout) -> list[dict[str, torch.Tensor]]:
    """Take two steps, with nothing, everything or only the optimizer moved to host memory in between, on a CPU as on a
    GPU. A job of the layout's ranks.

    Returns: weights of each, gathered on every rank.
    Raises:
        AssertionError: a move copied too little or too much, or the state of an offloaded model differs.
    """
    rows, micro_batches = layout.divide(backend)
    batch, found = make_backend_batch().rows(rows), []
    with patch.object(type(backend), "frees_device", True):
        for move in (None, backend.offload, backend.offload_optimizer):
            backend.load_model()
            run_step(backend, batch, micro_batches)
            if move is not None:
                optimizer = sum(_list_sizes(backend.iter_optimizer_state()))
                weights = sum(_list_sizes(backend.iter_weights())) if move == backend.offload else 0
                state = {name: tensor.clone() for name, tensor in backend.training_state()}
                for _ in range(2):  # an offloaded model stays where it is
                    transfer = move()
                    assert transfer is not None and transfer.num_bytes in (0, weights + optimizer), transfer
                    for name, tensor in backend.training_state():  # a checkpoint of an offloaded model
                        assert torch.equal(tensor, state[name]), f"{name} differs in host memory"
                back = backend.onload()
                assert back is not None and back.num_bytes == weights + optimizer > 0, back
            found.append(run_step(backend, batch, micro_batches).weights)
    return found


def _list_sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of each storage of this rank."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local)
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
