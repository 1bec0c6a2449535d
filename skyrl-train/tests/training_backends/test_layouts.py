"""Every layout of a training backend equals one FSDP2 rank, and the check names the faults that are planted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.expert_routes import no_route
from skyrl_train.training_backends.base import RankInfo, Step, TrainingBackend
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.fsdp2 import backend
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.backend_checks import NUM_STEPS, make_backend_batch, run_step
from skyrl_train_testing.backend_layouts import (
    BFLOAT16,
    BackendRanks,
    Layout,
    Tolerance,
    check_layout,
    check_resuming,
    run_steps_with_moves,
)
from skyrl_train_testing.findings import InvarianceError
from skyrl_train_testing.tiny_models import build_tiny_qwen3

FSDP2 = {
    "two ranks, sequence parallel": Layout(2, {"policy": {"sequence_parallel_size": 2}}),
    "two replicas of two ranks": Layout(4, {"policy": {"fsdp_config": {"fsdp_size": 2}}}),
    "two replicas, sequence parallel": Layout(
        4, {"policy": {"fsdp_config": {"fsdp_size": 2}, "sequence_parallel_size": 2}}
    ),
    "parameters in host memory": Layout(2, {"policy": {"fsdp_config": {"cpu_offload": True}}}),
    "padded rows": Layout(2, {"use_sample_packing": False}),
    "a critic": Layout(2, model="critic", micro_batch_size=1),
    "adapters": Layout(2, {"policy": {"model": {"lora": {"rank": 4}}}}, micro_batch_size=4, num_dummies=0),
    "a reference": Layout(2, model="ref"),
}


def test_two_fsdp2_ranks_equal_one(ranks: BackendRanks, tiny_model: str):
    check_layout(ranks, tiny_model, Layout(2))


# Parts of these are a member of their own.
FULL_LAYOUTS = FSDP2.keys() - {"two replicas, sequence parallel", "adapters"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in FULL_LAYOUTS else pytest.mark.slow) for name in FSDP2]
)
def test_fsdp2_layout_matches_single_rank(ranks: BackendRanks, tiny_model: str, name: str):
    check_layout(ranks, tiny_model, FSDP2[name])


# ---- another backend


# A low threshold: parameters of a tiny model are divided too.
DIVIDED = {"deepspeed_config": {"zero_optimization": {"stage3_param_persistence_threshold": 10}}}
BACKENDS = {
    "fsdp2": Layout(2),
    "deepspeed": Layout(2, {"strategy": "deepspeed", "policy": DIVIDED}),
    "megatron": Layout(2, {"strategy": "megatron", "policy": {"megatron_config": {"tensor_model_parallel_size": 2}}}),
}


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 whose heads every layout divides."""
    folder = tmp_path_factory.mktemp("models") / "larger"
    build_tiny_qwen3(hidden_size=32, scale=2.0, vocab_size=64, max_position_embeddings=128).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("megatron", marks=pytest.mark.full)])
def test_moves_to_host_memory_keep_results(ranks: BackendRanks, larger_model: str, name: str):
    layout = BACKENDS[name]
    for stayed, *others in ranks.run(layout, larger_model, run_steps_with_moves, layout):
        assert stayed and all(torch.equal(weight, moved[name]) for moved in others for name, weight in stayed.items())


@pytest.mark.full  # `test_runs_across_backends.py` resumes a run under another one
def test_training_resumes_under_all_other_backends(ranks: BackendRanks, larger_model: str):
    check_resuming(ranks, larger_model, BACKENDS)


@pytest.mark.full
@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16_is_within_tolerance(ranks: BackendRanks, larger_model: str, name: str):
    layout = BACKENDS[name]
    check_layout(ranks, larger_model, replace(layout, trainer={**layout.trainer, "bf16": True}), tolerance=BFLOAT16)


def export(backend: TrainingBackend, folder: Path) -> dict[str, torch.Tensor]:
    """Take a step and export the model. A job. Returns: the parameters."""
    policy_loss = PolicyLossRegistry.get("regular")
    worker = PolicyWorker(backend.cfg, policy_loss, NUM_STEPS, make_backend=lambda *_: backend)
    outcome = run_step(backend, make_backend_batch())
    worker.save_hf_model(str(folder), AutoTokenizer.from_pretrained(backend.cfg.trainer.policy.model.path or ""))
    return outcome.weights


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("name", BACKENDS)
def test_two_rank_export_loads_in_transformers(ranks: BackendRanks, chat_model: str, name: str, tmp_path: Path):
    weights, _ = ranks.run(BACKENDS[name], chat_model, export, tmp_path / "export")
    before = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32).state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for parameter, weight in exported.named_parameters():
        assert torch.equal(weight, weights[parameter]), parameter
        assert not torch.equal(weight, before[parameter]), parameter


# ---- mixtures of experts


@pytest.fixture(scope="module")
def mixture(save_mixture: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "mixture"
    return save_mixture(folder, scale=2.0, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize(
    "division", [Layout(2), Layout(4, {"policy": {"fsdp_config": {"fsdp_size": 2}}})], ids=["2 ranks", "2 x 2 ranks"]
)
def test_mixture_of_experts(ranks: BackendRanks, mixture: str, division: Layout):
    check_layout(ranks, mixture, division)


# ---- routing replay


class Replayed(NamedTuple):
    """Routes of this rank's rows, and a step that takes other ones."""

    rows: torch.Tensor
    routes: torch.Tensor
    log_probs: torch.Tensor
    grad_norm: float
    counts: torch.Tensor
    num_differing: float


def replay_other_routes(backend: TrainingBackend, layout: Layout) -> Replayed:
    rows, micro_batches = layout.divide(backend)
    own = make_backend_batch().rows(rows)
    _, routes = backend.forward_recording_routes(own, micro_batches)
    own["expert_routes"] = torch.where(routes == no_route(routes.dtype), routes, (routes + 1) % 4)
    outcome = run_step(backend, own, micro_batches)
    assert outcome.router is not None
    use = outcome.router.counts, outcome.router.num_differing
    return Replayed(rows, routes, outcome.outputs, outcome.step.grad_norm, *use)


def replaying(strategy: str, section: dict[str, object]) -> Layout:
    policy = {"routing_replay": "R2", f"{strategy}_config": section}
    # Layers are computed again in the backward, when other micro-batches are under way.
    return Layout(2, {"strategy": strategy, "gradient_checkpointing": True, "policy": policy})


REPLAYING = {
    **{
        f"deepspeed, stage {stage}": replaying("deepspeed", {"zero_optimization": {"stage": stage}}) for stage in (0, 3)
    },
    "megatron, tensor and sequence parallel": replaying("megatron", {"tensor_model_parallel_size": 2}),
    "megatron, two stages": replaying("megatron", {"pipeline_model_parallel_size": 2}),
    "megatron, experts dealt": replaying(
        "megatron", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    ),
}


FULL_REPLAYS = {"deepspeed, stage 0", "deepspeed, stage 3", "megatron, two stages", "megatron, experts dealt"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in FULL_REPLAYS else pytest.mark.slow) for name in REPLAYING],
)
def test_replayed_routes_match_fsdp2(ranks: BackendRanks, mixture: str, name: str):
    whole = Layout(1, {"policy": {"routing_replay": "R2"}})
    [expected] = ranks.run(whole, mixture, replay_other_routes, whole)
    outcomes = ranks.run(REPLAYING[name], mixture, replay_other_routes, REPLAYING[name])
    for outcome in outcomes:
        assert torch.equal(outcome.routes, expected.routes[outcome.rows])
        torch.testing.assert_close(outcome.log_probs, expected.log_probs[outcome.rows], atol=1e-5, rtol=1e-5)
        assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert torch.equal(torch.stack([outcome.counts for outcome in outcomes]).sum(dim=0), expected.counts)
    assert sum(outcome.num_differing for outcome in outcomes) == expected.num_differing > 0


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fsdp2", "deepspeed"])
def test_single_gpu_rank_matches_single_cpu_rank(ranks: BackendRanks, tiny_model: str, name: str):
    """Kernels add in another order: float32 to 1e-4, the other tolerances of the check as they are."""
    layout = replace(BACKENDS[name], num_ranks=1, device="cuda")
    check_layout(ranks, tiny_model, layout, tolerance=Tolerance(scores=1e-4, weights=5e-5))


# ---- planted faults


class GradientOfOneRank(FSDP2Backend):
    """Averages over ranks what is to be added."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class LastMicroBatchOnly(FSDP2Backend):
    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        super().backward(loss)


class StepsWithNan(FSDP2Backend):
    def optimizer_step(self) -> Step:
        with patch.object(backend.math, "isfinite", lambda _: True):
            return super().optimizer_step()


class ForgottenMoments(FSDP2Backend):
    def load_training_state(self, files: StateFiles) -> None:
        super().load_training_state(files)
        for state in self.optimizer.state.values():
            state["exp_avg_sq"].fill_(1.0)


class HalfOfTheRows(FSDP2Backend):
    """Backend that divides the rows otherwise than it reports: both ranks compute the first part."""

    def join(self, info: RankInfo) -> None:
        super().join(info)
        self.parallel = replace(self.parallel, rank=0)


class TransposedExpert(FSDP2Backend):
    """Gives the columns of an expert's square matrix for its rows."""

    def gather_parameters(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().gather_parameters(dtype):
            if name == "model.layers.0.mlp.experts.gate_up_proj":
                tensor = torch.cat([tensor[:1].transpose(1, 2), tensor[1:]])
            yield name, tensor


@pytest.mark.full
def test_check_names_transposed_expert(ranks: BackendRanks, mixture: str):
    with pytest.raises(InvarianceError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        check_layout(ranks, mixture, Layout(2, make_backend=TransposedExpert))


@pytest.mark.parametrize(
    ("fault", "invariance"),
    [
        (GradientOfOneRank, "agreement"),
        pytest.param(LastMicroBatchOnly, "agreement", marks=pytest.mark.full),
        pytest.param(StepsWithNan, "skipped_update", marks=pytest.mark.slow),
        pytest.param(ForgottenMoments, "deterministic", marks=pytest.mark.full),
        pytest.param(HalfOfTheRows, "agreement", marks=pytest.mark.full),
    ],
)
def test_check_names_injected_fault(ranks: BackendRanks, tiny_model: str, fault: type[FSDP2Backend], invariance: str):
    with pytest.raises(InvarianceError) as caught:
        check_layout(ranks, tiny_model, Layout(2, make_backend=fault))
    assert invariance in caught.value.names
