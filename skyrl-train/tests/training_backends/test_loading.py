"""Ranks that read their parts of the weights from files hold the bits that they get from a rank 0 which loads the whole
model."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.config import training_backends
from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.distributed.ulysses import build_sequence_parallel
from skyrl_train.models import weight_files
from skyrl_train.training_backends import transformers_backend
from skyrl_train.training_backends.base import ModelName, ParallelInfo, RankInfo, TrainingBackend
from skyrl_train_testing.backend_checks import NUM_STEPS, make_settings
from skyrl_train_testing.rank_processes import ForkedRanks
from skyrl_train_testing.tiny_models import build_tiny_mixture, build_tiny_qwen3

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")
LORA = {"rank": 4, "alpha": 8}


@dataclass(frozen=True)
class Plan:
    """Model to load: folder, role, settings of its section and of `trainer`."""

    path: str
    name: ModelName = "policy"
    own: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


def deepspeed(path: str, stage: int, name: ModelName = "policy", bf16: bool = False, **own: Any) -> Plan:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10}
    own["deepspeed_config"] = {"zero_optimization": zero}
    return Plan(path, name, own, {"strategy": "deepspeed", "bf16": bf16})


def with_lora(plan: Plan, **lora: Any) -> Plan:
    return Plan(plan.path, plan.name, plan.own | {"model": {"lora": LORA | lora}}, plan.trainer)


class Rank:
    """One rank, for all plans of a test."""

    def join(self, info: RankInfo) -> None:
        self.joined = self._new(deepspeed("", 0))
        self.joined.join(info)

    def _new(self, plan: Plan) -> TrainingBackend:
        cfg = make_settings(plan.path, {**plan.trainer, plan.name: plan.own}, plan.name)
        make = training_backends.TrainingBackendRegistry.get(cfg.trainer.strategy)
        return make(cfg, plan.name, None if plan.name == "ref" else NUM_STEPS)

    def load(self, plan: Plan) -> TrainingBackend:
        backend, joined = self._new(plan), self.joined.parallel
        shared = backend.settings.sequence_parallel_size
        backend.device = self.joined.device
        backend.parallel = ParallelInfo(rank=joined.rank, world_size=joined.world_size, ranks_per_replica=shared)
        backend.sequence_parallel = build_sequence_parallel(shared)
        backend.load_model()
        return backend

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)


class Group:
    """Ranks in processes."""

    def __init__(self, num_ranks: int, folder: Path):
        self.ranks = ForkedRanks(f"loading_{num_ranks}", Rank, num_ranks=num_ranks, log_folder=folder)
        self.num_ranks = num_ranks

    def join(self) -> None:
        port, size = find_free_port(), self.num_ranks
        self._call("join", [(RankInfo(rank=rank, world_size=size, master_port=port),) for rank in range(size)])

    def _call(self, method: str, args: list[tuple[Any, ...]]) -> list[Any]:
        answers = self.ranks.call([[(method, own)] for own in args], 240, "the test's deadline")
        return [answer for [answer] in asyncio.run(answers)]

    def call(self, *args: Any) -> list[Any]:
        return self._call("call", [args] * self.num_ranks)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Group]]:
    """`groups(n)` is a group of n ranks, started when it is first asked for."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test
    started: dict[int, Group] = {}

    def get(num_ranks: int) -> Group:
        if num_ranks not in started:
            started[num_ranks] = Group(num_ranks, tmp_path_factory.mktemp("ranks"))
            started[num_ranks].join()
        return started[num_ranks]

    yield get
    for group in started.values():
        group.ranks.kill()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def held(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    """Return copies of what a rank holds of its model, and of all of it gathered."""
    model: Any = backend.model  # type: ignore[attr-defined]
    tensors = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        tensors[f"{name}, trained: {parameter.requires_grad}"] = getattr(parameter, "ds_tensor", local)
    tensors |= dict(model.named_buffers())
    tensors |= {f"{name}, gathered": tensor for name, tensor in backend.gather_parameters()}
    optimizer = getattr(getattr(backend, "engine", None), "basic_optimizer", None)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        tensors |= {f"optimizer {number} {i}": tensor for i, tensor in enumerate(group["params"])}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class BuildsOf:
    """Function that makes models, and remembers which of them have weights."""

    def __init__(self, build: Callable[..., Any]):
        self.build, self.with_weights = build, list[bool]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.with_weights.append(kwargs["with_weights"])
        return self.build(*args, **kwargs)


def differences_of_loading(rank: Rank, plans: list[Plan]) -> list[str]:
    """Load each model both ways. Returns: names of tensors that differ, or of plans that were not loaded in parts."""
    wrong = []
    for plan in plans:
        with pytest.MonkeyPatch.context() as patch:
            builds = BuildsOf(transformers_backend.build_model)
            patch.setattr(transformers_backend, "build_model", builds)
            parts, random_state = held(rank.load(plan)), torch.get_rng_state()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers_backend, "open_on_all_ranks", lambda *_: None)
            expected = held(rank.load(plan))
        if builds.with_weights != [False]:
            wrong.append(f"{plan}: a whole model was loaded")
        if list(parts) != list(expected):
            wrong.append(f"{plan}: {parts.keys() ^ expected.keys()}")
            continue
        for name, tensor in expected.items():
            if tensor.dtype != parts[name].dtype or not torch.equal(tensor, parts[name]):
                wrong.append(f"{plan}: {name}")
        if rank.joined.parallel.rank == 0 and not torch.equal(random_state, torch.get_rng_state()):
            wrong.append(f"{plan}: further random numbers")
    return wrong


def folder_of(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")  # pyright: ignore[reportArgumentType]
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders, each of several files: tied, untied in bfloat16 with odd numbers of rows, experts, a critic."""
    root = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = dict(hidden_size=32, scale=3.0, max_position_embeddings=128)
    odd: dict[str, Any] = dict(vocab_size=67, intermediate_size=45, tie_word_embeddings=False)
    critic = root / "critic"
    folder_of(build_tiny_qwen3(vocab_size=64, **sizes), critic)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    save_file({"value_head.weight": head}, critic / "head.safetensors")
    return {
        "tied": folder_of(build_tiny_qwen3(vocab_size=64, **sizes), root / "tied"),
        "odd": folder_of(build_tiny_qwen3(**(sizes | odd)), root / "odd", torch.bfloat16),
        "experts": folder_of(build_tiny_mixture(num_experts=5), root / "experts"),
        "critic": str(critic),
    }


@pytest.mark.slow
def test_two_ranks_are_bit_exact_with_whole_model(groups: Callable[[int], Group], models: dict[str, str]):
    plans = [
        Plan(models["tied"]),
        Plan(models["experts"]),
        with_lora(Plan(models["odd"])),
        Plan(models["critic"], "critic"),
        deepspeed(models["odd"], 1),
        deepspeed(models["experts"], 3),
    ]
    assert groups(2).call(differences_of_loading, plans) == [[], []]


@pytest.mark.full
def test_role_and_layout_are_bit_exact_with_whole_model(groups: Callable[[int], Group], models: dict[str, str]):
    plans = [Plan(model, trainer={"bf16": bf16}) for model in models.values() for bf16 in (False, True)]
    for own in (
        {"sequence_parallel_size": 2},
        {"fsdp_config": {"fsdp_size": 1}},
        {"fsdp_config": {"cpu_offload": True}},
    ):
        plans += [Plan(models[name], own=own) for name in ("odd", "experts")]
    for lora in ({"init_method": "gaussian"}, {"init_method": "orthogonal"}, {"dropout": 0.1}):
        plans.append(with_lora(Plan(models["tied"]), **lora))
    plans += [with_lora(Plan(models["experts"])), with_lora(deepspeed(models["odd"], 3))]
    for name in ("critic", "ref"):
        plans += [Plan(model, name) for model in models.values()]
    for stage in range(4):
        plans += [deepspeed(model, stage) for model in models.values()]
        plans += [deepspeed(models["odd"], stage, name) for name in ("critic", "ref")]
        plans += [deepspeed(models["odd"], stage, bf16=True), with_lora(deepspeed(models["tied"], stage))]
    for num_ranks in (1, 2):
        own = [plan for plan in plans if num_ranks == 2 or plan.own.get("sequence_parallel_size", 1) == 1]
        assert groups(num_ranks).call(differences_of_loading, own) == [[]] * num_ranks
    hybrid = [Plan(models[name], own={"fsdp_config": {"fsdp_size": 2}}) for name in ("odd", "experts")]
    assert groups(4).call(differences_of_loading, hybrid) == [[]] * 4


def warnings_of_loading(rank: Rank, plan: Plan) -> list[str]:
    """Load a model. Returns: the warnings, and at the end the names of tensors that are not in its only file."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.logger, "warning", lambda message, *args: messages.append(message % args))
        backend = rank.load(plan)
    stored = load_file(Path(plan.path) / "model.safetensors")
    weights = dict(backend.gather_parameters())
    return messages + [name for name, tensor in weights.items() if not torch.equal(stored[name].float(), tensor)]


def test_rank_0_loads_unshardable_weights(groups: Callable[[int], Group], tiny_model: str, tmp_path: Path):
    folder = tmp_path / "whole"
    build_tiny_qwen3(hidden_size=32, vocab_size=64).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    problem = "model.embed_tokens.weight = lm_head.weight is stored under 2 names"
    reason = f"rank 0 loads all weights of {folder}, for every rank: {problem}"
    for plan in (Plan(str(folder)), deepspeed(str(folder), 3)):
        assert groups(2).call(warnings_of_loading, plan) == [[reason], []]
    [[warning, *_], _] = groups(2).call(warnings_of_loading, with_lora(Plan(tiny_model), init_method="olora"))
    assert warning.endswith("trainer.policy.model.lora.init_method=olora computes adapters from the weights")
