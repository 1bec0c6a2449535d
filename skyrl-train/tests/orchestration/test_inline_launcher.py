"""Workers and engines as objects of this process: rules of the settings, random numbers, one process group."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl_train.config import SkyRLConfig, validate_cfg, validate_generator_cfg
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.distributed.process_group import build_mesh
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.orchestration import inline_launcher
from skyrl_train.orchestration.inline_launcher import InlineRank, SharedProcessGroup
from skyrl_train.utils.random_state import RandomState
from skyrl_train.weight_sync.plan import RankLocation, Route, plan_routes
from skyrl_train_testing.weight_holders import HolderInfo


def settings(**sections: Any) -> dict[str, Any]:
    """Settings of an inline run on a CPU; `placement` is a part of the trainer's."""
    placement = {"launcher": "inline", "device": "cpu", **sections.pop("placement", {})}
    trainer = {"placement": placement, **sections.pop("trainer", {})}
    return {"trainer": trainer, **sections}


CRITIC = {"critic": {"model": {"path": "m"}}, "algorithm": {"advantage_estimator": "gae"}}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"placement": {"policy_num_gpus_per_node": 2}}, "policy_num_gpus_per_node=2"),
        ({"placement": {"policy_num_nodes": 2}}, "trainer.placement.launcher=ray"),
        ({"placement": {"ref_num_nodes": 3}}, "ref_num_nodes=3"),
        ({"placement": {"critic_num_gpus_per_node": 2}, "trainer": CRITIC}, "critic_num_gpus_per_node=2"),
        (
            {"generator": {"weight_sync_strategy": "cuda_ipc"}, "placement": {"device": "cuda"}},
            "cuda_ipc",
        ),
        (
            {
                "generator": {"weight_sync_strategy": "broadcast", "weight_sync_backend": "nccl"},
                "placement": {"device": "cuda"},
            },
            "weight_sync_strategy=broadcast",
        ),
    ],
)
def test_multi_process_settings_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        validate_cfg(SkyRLConfig.from_dict(settings(**changes)))


def test_engines_with_separate_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.config.engine_kinds.find_spec", lambda name: True)  # as if installed
    for backend in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=rf"generator.backend={backend} .*native"):
            validate_generator_cfg(settings(generator={"backend": backend}))
    elsewhere = {"run_engines_locally": False, "remote_inference_engine_urls": ["127.0.0.1:8000"], "backend": "vllm"}
    validate_generator_cfg(settings(generator=elsewhere, placement={"colocate_all": False}))


def test_auto_selects_native_engine_on_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.config.engine_kinds.find_spec", lambda name: True)
    assert validate_cfg(settings(placement={"device": "cuda"})).generator.backend == "native"


def test_ray_cluster_with_inline_launcher_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for validate in (validate_cfg, validate_generator_cfg):
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS=10\.0\.0\.1:6379"):
            validate(settings())
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS"):
        validate_supervised_cfg({**settings(), "data": {"train_data": ["x"]}}, SupervisedConfig)


@pytest.mark.parametrize(
    "config_type, setting", [(SupervisedConfig, "policy_num_gpus_per_node"), (PreferenceConfig, "ref_num_nodes")]
)
def test_supervised_training_on_several_ranks_is_refused(config_type: type[SupervisedConfig], setting: str):
    data = {"train_data": ["x"]}
    validate_supervised_cfg({**settings(), "data": data}, config_type)
    with pytest.raises(ConfigError, match=rf"trainer.placement.{setting}=2 must be 1"):
        validate_supervised_cfg({**settings(placement={setting: 2}), "data": data}, config_type)


@pytest.mark.parametrize("device, colocated", [("cpu", True), ("cpu", False), ("cuda", True), ("cuda", False)])
def test_weights_stay_in_process(device: Any, colocated: bool):
    engines, ranks = [HolderInfo(node="here", gpus=["a"])], [RankLocation(node="here", gpu="a")]
    where: dict[str, Any] = {"colocated": colocated, "device": device, "remote": False, "one_process": True}
    assert plan_routes("auto", engines, ranks, **where) == [Route("shared_memory")]
    assert plan_routes("delta", engines, ranks, **where) == [Route("shared_memory", "delta")]


# ---- workers


class Draws:
    """A worker that draws from torch's global generator."""

    def __init__(self, seed: int | None = None):
        if seed is not None:
            torch.manual_seed(seed)

    def draw(self) -> float:
        return torch.rand(()).item()

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def fail(self) -> None:
        raise RuntimeError("out of luck")

    def teardown(self) -> None: ...


async def answer(rank: InlineRank, *methods: str) -> list[Any]:
    [answers] = await rank.call([[(method, ()) for method in methods]], 60.0, "some.setting")
    return answers


async def test_each_worker_has_separate_random_state():
    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(3)
    first, second = InlineRank("policy", Draws, (3,), "cpu"), InlineRank("critic", Draws, (3,), "cpu")
    drawn = [await answer(first, "draw"), await answer(second, "draw", "draw"), await answer(first, "draw", "draw")]
    assert drawn == [expected[:1], expected[:2], expected[1:3]]
    assert torch.rand(()).item() == expected[0], "the driver's are not touched"
    assert await answer(first, "initial_seed") == [3]
    await asyncio.gather(first.shutdown(), second.shutdown())


async def test_worker_starts_with_random_state_of_new_process():
    """Whatever this process has drawn before."""
    torch.manual_seed(11)
    rank = InlineRank("policy", Draws, (), "cpu")
    fresh = torch.Generator()
    assert await answer(rank, "draw") == [torch.rand((), generator=fresh).item()]
    assert await answer(rank, "initial_seed") == [fresh.initial_seed()]
    await rank.shutdown()


@pytest.mark.gpu
def test_gpu_random_state_is_swapped():
    torch.cuda.manual_seed(1)
    outside = torch.cuda.get_rng_state()
    own = RandomState("cuda")
    with own.activate():
        first = torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    fresh = torch.Generator("cuda")
    assert torch.equal(first, torch.rand(3, device="cuda", generator=fresh))


async def test_failed_call_names_worker_and_keeps_worker_usable():
    rank = InlineRank("policy", Draws, (3,), "cpu")
    with pytest.raises(WorkerError, match=r"^policy worker 0 .*RuntimeError: out of luck\n"):
        await answer(rank, "fail")
    assert len(await answer(rank, "draw")) == 1
    await rank.shutdown()
    cannot = InlineRank("critic", Draws, ("no seed",), "cpu")
    with pytest.raises(ValueError, match=r"no seed") as error:
        await answer(cannot, "draw")
    assert error.value.__notes__[0].startswith("raised in critic worker 0; full traceback: ")
    await cannot.shutdown()


class Joins(Draws):
    """A worker that joins the process group of its one rank."""

    def join(self) -> int:
        from skyrl_train.distributed.process_group import find_free_port, init_process_group

        init_process_group(
            rank=0,
            world_size=1,
            master_address="127.0.0.1",
            master_port=find_free_port(),
            device=torch.device("cpu"),
            timeout_seconds=60.0,
        )
        return dist.get_world_size()


async def test_shared_process_group_ends_with_last_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inline_launcher, "_PROCESS_GROUP", SharedProcessGroup())  # other tests may have left ranks
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks = [InlineRank(name, Joins, (), "cpu") for name in ("policy", "ref")]
    for rank in ranks:
        assert await answer(rank, "join") == [1]
    await ranks[0].shutdown()
    assert dist.is_initialized(), "the other still computes"
    await ranks[1].shutdown()
    assert not dist.is_initialized()


async def test_foreign_process_group_is_kept(group_of_one: None, tmp_path: Path):
    rank = InlineRank("policy", Joins, (), "cpu")
    assert await answer(rank, "join") == [1]
    await rank.shutdown()
    assert dist.is_initialized()


class Plans(Joins):
    """A worker that adds sharded tensors."""

    def add(self) -> int:
        """Return how often torch had the plan of an operation already, in the model thread."""
        self.join()
        mesh = build_mesh(torch.device("cpu"))
        tensor = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        assert gather_full_tensor(tensor + tensor).tolist() == [2.0, 2.0]
        return torch._C._get_DTensor_sharding_propagator_cache_stats()[0]


async def test_plans_last_as_long_as_foreign_process_group(group_of_one: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inline_launcher, "_PROCESS_GROUP", SharedProcessGroup())
    hits = []
    for is_new in (True, False, True):
        if is_new:
            dist.destroy_process_group()
            Joins().join()
        rank = InlineRank("policy", Plans, (), "cpu")
        hits += await answer(rank, "add")
        await rank.shutdown()
    assert hits[0] == 0 and hits[1] > 0 and hits[2] == 0
