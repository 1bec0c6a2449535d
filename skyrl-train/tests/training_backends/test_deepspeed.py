"""DeepSpeed's stages train as one rank of FSDP2 does, whatever the number of ranks and the division of a step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.base import TrainingBackend
from skyrl_train_testing.backend_checks import check_training_backend, make_backend_batch
from skyrl_train_testing.backend_layouts import (
    BFLOAT16,
    BackendRanks,
    Layout,
    check_layout,
    check_resuming,
    run_steps_with_moves,
)
from skyrl_train_testing.findings import InvarianceError
from skyrl_train_testing.tiny_models import build_tiny_qwen3

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")
STAGES = (0, 1, 2, 3)


def stages(*slow: int, daily: int | None = None, among: tuple[int, ...] = STAGES) -> pytest.MarkDecorator:
    """Parametrize by stages: those given are slow, `daily` is neither, the others of `among` are full."""
    marks = {stage: [pytest.mark.slow if stage in slow else pytest.mark.full] for stage in among if stage != daily}
    return pytest.mark.parametrize("stage", [pytest.param(stage, marks=marks.get(stage, [])) for stage in among])


ADAPTERS = {"model": {"lora": {"rank": 4}}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def layout(
    stage: int,
    num_ranks: int = 2,
    *,
    model: Any = "policy",
    zero: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    make: Any = None,
    micro_batch_size: int = 2,
    num_dummies: int = 1,
    **trainer: Any,
) -> Layout:
    """Describe ranks of a stage.

    Args:
        zero: further settings of `zero_optimization`.
        own: settings of the model.
    """
    # A low threshold: parameters of a tiny model are divided too.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10, **(zero or {})}
    section = {"deepspeed_config": {"zero_optimization": zero} | (own or {}).get("deepspeed_config", {})}
    settings = {"strategy": "deepspeed", model: {**(own or {}), **section}, **trainer}
    return Layout(num_ranks, settings, make, model, micro_batch_size, num_dummies)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Larger weights make the third step depend on the rounding of the first.
    folder = tmp_path_factory.mktemp("models") / "deepspeed"
    build_tiny_qwen3(hidden_size=32, scale=2.0, vocab_size=64, max_position_embeddings=128).save_pretrained(folder)
    return str(folder)


@stages()
def test_two_ranks_match_single_fsdp2_rank(ranks: BackendRanks, model: str, stage: int):
    check_layout(ranks, model, layout(stage))


DIVISIONS: dict[str, dict[str, Any]] = {
    "one rank": dict(num_ranks=1, micro_batch_size=4, num_dummies=0),
    "adapters, shared sequences": dict(own=ADAPTERS | {"sequence_parallel_size": 2}, micro_batch_size=1, num_dummies=0),
    "critic, recomputed, padded rows": dict(
        model="critic", gradient_checkpointing=True, use_sample_packing=False, micro_batch_size=4, num_dummies=0
    ),
    "critic with adapters": dict(model="critic", own=ADAPTERS),
}


# `full` has the product.
CHOSEN = {(3, "adapters, shared sequences")}


@pytest.mark.parametrize(
    ("stage", "division"),
    [
        pytest.param(stage, division, marks=pytest.mark.slow if (stage, division) in CHOSEN else pytest.mark.full)
        for stage in STAGES
        for division in DIVISIONS
    ],
)
def test_layout_matches_single_fsdp2_rank(ranks: BackendRanks, model: str, stage: int, division: str):
    check_layout(ranks, model, layout(stage, **DIVISIONS[division]))


@pytest.fixture(scope="module")
def mixture(save_mixture: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("models") / "mixture", scale=2.0)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "num_ranks"), [*((stage, 2) for stage in STAGES), (1, 1), (3, 1)])
def test_mixture_of_experts(ranks: BackendRanks, mixture: str, stage: int, num_ranks: int):
    check_layout(ranks, mixture, layout(stage, num_ranks))


@stages(3, among=(0, 3))
def test_reference_scores_match_fsdp2(ranks: BackendRanks, model: str, stage: int):
    check_layout(ranks, model, layout(stage, model="ref"))


@stages(2, among=(1, 2, 3))
def test_host_offload_gives_same_update(ranks: BackendRanks, model: str, stage: int):
    zero = OFFLOAD | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})
    check_layout(ranks, model, layout(stage, zero=zero, micro_batch_size=1))


@stages()
def test_bfloat16_is_within_tolerance(ranks: BackendRanks, model: str, stage: int):
    check_layout(ranks, model, layout(stage, bf16=True), tolerance=BFLOAT16)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_parameters_are_within_tolerance(ranks: BackendRanks, model: str, stage: int):
    """The float32 weights of the optimizer begin as the rounded ones."""
    own = {"deepspeed_config": {"torch_autocast": {"enabled": False}}}
    rounded = replace(BFLOAT16, weights=BFLOAT16.weights + 1e-3, mean_weights=3e-4, loaded=1e-3)
    check_layout(ranks, model, layout(stage, own=own, bf16=True), tolerance=rounded)


@pytest.mark.full  # test_layouts.py goes on under every other backend
@pytest.mark.parametrize("own", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_run_resumes_with_other_stage_strategy_and_num_ranks(ranks: BackendRanks, model: str, own: dict[str, Any]):
    stages = {f"stage {stage}": layout(stage, 2 - stage % 2, own=own) for stage in STAGES}
    check_resuming(ranks, model, stages | {"fsdp2": Layout(2, {"policy": own})})


# ---- functions of this backend alone: jobs of its ranks


def weights_after_moves(backend: Any, layout: Layout) -> list[dict[str, torch.Tensor]]:
    """Take two steps, with nothing, all or the optimizer moved to host memory in between as on a GPU."""
    from skyrl_train.training_backends.deepspeed.memory import build_memory_report

    kinds = [line.split()[0] for line in build_memory_report(backend.engine, backend.model, backend.stage).splitlines()]
    assert kinds[0] == "parameters" and {"moments", "gradients"} < set(kinds) and kinds[-1] == "all"
    return run_steps_with_moves(backend, layout)


@stages()
def test_offloaded_state_is_restored(ranks: BackendRanks, model: str, stage: int):
    division = layout(stage)
    for stayed, *others in ranks.run(division, model, weights_after_moves, division):
        assert all(torch.equal(weight, moved[name]) for moved in others for name, weight in stayed.items())


def taken_over_and_loaded(backend: Any, layout: Layout, other: str) -> list[dict[str, torch.Tensor]]:
    """Return weights and scores of a model that takes over those of another folder, and of one loaded from there."""
    rows, micro_batches = layout.divide(backend)
    batch, found = make_backend_batch().rows(rows), []
    backend.forward(batch, micro_batches)  # stage 3 may then hold former weights whole
    for take_over in (lambda: backend.load_parameters(other), backend.load_model):
        backend.settings.model.path = other
        take_over()
        weights = {name: tensor.clone() for name, tensor in backend.gather_parameters()}
        found.append(weights | {"scores": backend.forward(batch, micro_batches)})
    return found


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=pytest.mark.slow if (name, stage) == ("policy", 0) else pytest.mark.full)
        for name, stage in [("ref", 0), ("ref", 3), ("policy", 0), ("policy", 1), ("policy", 3)]
    ],
)
def test_weights_are_copied_from_other_model(ranks: BackendRanks, model: str, tiny_model: str, name: str, stage: int):
    division = layout(stage, model=name)
    for taken, loaded in ranks.run(division, model, taken_over_and_loaded, division, tiny_model):
        assert all(torch.equal(taken[key], tensor) for key, tensor in loaded.items())


def refusals(_: TrainingBackend) -> list[str]:
    """Return the errors of a DeepSpeed that lacks each name that is looked for."""
    from skyrl_train.training_backends.deepspeed import process

    errors = []
    for name in ("MANAGED_GRADIENT_ACCUMULATION", "is_invalid_grad_norm"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
            for module, known in process._FEATURES:
                if known == name:
                    patch.delattr(module, name)
            process.check_version()
        errors.append(str(caught.value))
    return errors


def test_deepspeed_release_with_known_bug_is_rejected(ranks: BackendRanks, model: str):
    [errors] = ranks.run(layout(2, 1), model, refusals)
    assert "too old (before 0.19.4, stages 1 and 2 keep only the gradient of the last micro-batch" in errors[0]
    assert "a non-finite gradient" in errors[1]


# ---- the checks of one rank, and faults that checks name


def keep_invariances(backend: TrainingBackend, model: str, settings: Mapping[str, Any]) -> None:
    check_training_backend(type(backend), model, settings=settings)


@stages(3, daily=2)
def test_backend_passes_invariance_checks(ranks: BackendRanks, tiny_model: str, stage: int):
    division = layout(stage, 1)
    ranks.run(division, tiny_model, keep_invariances, tiny_model, division.trainer)


def healthy(*args: Any) -> Any:
    """Make a backend, whose modules are then there to be patched."""
    # Here, as a function that goes to a rank by value takes the registry of this process along.
    from skyrl_train.config.training_backends import TrainingBackendRegistry

    return TrainingBackendRegistry.get("deepspeed")(*args)


def boundary_at_every_backward(*args: Any) -> Any:
    backend = healthy(*args)
    from skyrl_train.training_backends.deepspeed import backend as module

    right = module.build_model_settings
    module.build_model_settings = lambda *args: right(*args) | {"managed_gradient_accumulation": True}
    return backend


def doubled_scaling(*args: Any) -> Any:
    backend = healthy(*args)
    right = backend.backward
    backend.backward = lambda loss: right(2 * loss)
    return backend


def steps_on_broken_gradients(*args: Any) -> Any:
    backend = healthy(*args)
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    modules: list[Any] = [stage3, stage_1_and_2]
    for module in modules:
        module.is_invalid_grad_norm = lambda norm: False
    return backend


def last_rank_dropped(*args: Any) -> Any:
    backend = healthy(*args)
    right = backend.backward
    backend.backward = lambda loss: right(loss * (backend.parallel.rank + 1 < backend.parallel.world_size))
    return backend


def moments_forgotten(*args: Any) -> Any:
    backend = healthy(*args)
    right = backend.load_training_state

    def load(files: Any) -> None:
        right(files)
        backend.engine.basic_optimizer.state.clear()

    backend.load_training_state = load
    return backend


FAULTS = [
    (boundary_at_every_backward, 2, "agreement"),
    (last_rank_dropped, 3, "agreement"),
    (steps_on_broken_gradients, 2, "skipped_update"),
    (moments_forgotten, 1, "deterministic"),
    (doubled_scaling, 3, "agreement"),
    (boundary_at_every_backward, 1, "agreement"),
    *((last_rank_dropped, stage, "agreement") for stage in (0, 1, 2)),
]


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("fault", "stage", "invariance"),
    FAULTS,
)
def test_check_names_injected_fault(
    ranks: BackendRanks, model: str, fault: Callable[..., Any], stage: int, invariance: str
):
    with pytest.raises(InvarianceError) as caught:
        check_layout(ranks, model, layout(stage, make=fault))
    assert invariance in caught.value.names
