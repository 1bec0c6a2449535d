"""Placement decides how weights travel to each engine and from which rank, and each engine gets ranks of its own."""

from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.weight_sync.plan import RankLocation, Route, init_infos_for, plan_routes
from skyrl_train_testing.weight_holders import HolderInfo

HERE, THERE = RankLocation(node="here"), RankLocation(node="there")
SHARED_CPU: dict[str, Any] = {"colocated": True, "device": "cpu", "remote": False}
SHARED_GPU: dict[str, Any] = SHARED_CPU | {"device": "cuda"}
APART_CPU: dict[str, Any] = SHARED_CPU | {"colocated": False}
REMOTE: dict[str, Any] = {"colocated": False, "device": "cpu", "remote": True}


def route(strategy: Any, where: dict[str, Any], *, node: str = "here", gpu: str = "a") -> Route:
    """The route to one engine, of a policy of one rank on `here` and GPU `a`."""
    gpus = [gpu] if where["device"] == "cuda" else []
    ranks = [RankLocation(node="here", gpu="a" if gpus else None)]
    [planned] = plan_routes(strategy, [HolderInfo(node=node, gpus=gpus)], ranks, **where)
    return planned


@pytest.mark.parametrize(
    "strategy, where, expected",
    [
        ("auto", SHARED_CPU, Route("shared_memory")),
        ("auto", SHARED_GPU, Route("cuda_ipc")),
        ("auto", APART_CPU, Route("broadcast")),
        ("auto", APART_CPU | {"device": "cuda"}, Route("broadcast")),
        ("auto", REMOTE, Route("checkpoint")),
        ("delta", SHARED_CPU, Route("shared_memory", "delta")),
        ("delta", SHARED_GPU, Route("shared_memory", "delta")),
        ("delta", APART_CPU, Route("broadcast", "delta")),
        ("delta", REMOTE, Route("checkpoint", "delta")),
        ("shared_memory", APART_CPU, Route("shared_memory")),
        ("shared_memory", REMOTE, Route("shared_memory")),
        ("cuda_ipc", SHARED_GPU, Route("cuda_ipc")),
        ("broadcast", SHARED_CPU, Route("broadcast")),
        ("broadcast", REMOTE, Route("broadcast")),
        ("checkpoint", SHARED_CPU, Route("checkpoint")),
    ],
)
def test_each_strategy_selects_expected_route(strategy, where: dict[str, Any], expected: Route):
    assert route(strategy, where) == expected


@pytest.mark.parametrize(
    "strategy, where, expected",
    [
        ("auto", SHARED_CPU, "broadcast"),  # engines of a shared cluster that landed elsewhere
        ("auto", SHARED_GPU, "broadcast"),
        ("auto", REMOTE, "checkpoint"),
        ("delta", SHARED_CPU, "broadcast"),
    ],
)
def test_engine_on_machine_without_ranks_cannot_use_shared_memory(strategy, where: dict[str, Any], expected: str):
    assert route(strategy, where, node="there", gpu="b").transport == expected


@pytest.mark.parametrize(
    "strategy, where, why",
    [
        ("shared_memory", SHARED_CPU, "the machine of each engine. Use generator.weight_sync_strategy=broadcast"),
        ("shared_memory", REMOTE, "the machine of each engine. Use generator.weight_sync_strategy=checkpoint"),
        ("cuda_ipc", SHARED_CPU, "needs models on cuda; they are on cpu"),
        ("cuda_ipc", SHARED_GPU, "on the workers' GPUs"),
        ("cuda_ipc", SHARED_GPU | {"colocated": False}, "on the workers' GPUs"),
        ("cuda_ipc", REMOTE | {"device": "cuda"}, "on the workers' GPUs"),
    ],
)
def test_impossible_route_is_refused_with_alternative(strategy, where: dict[str, Any], why: str):
    with pytest.raises(ConfigError) as raised:
        route(strategy, where, node="there", gpu="b")
    assert f"generator.weight_sync_strategy={strategy}" in str(raised.value) and why in str(raised.value)


def test_adapters_with_transport_are_refused():
    with pytest.raises(ValueError, match="adapters are files"):
        route("adapter", SHARED_CPU)


# ---- several ranks


def test_ranks_serve_engines_of_same_machine_round_robin():
    """Two ranks on each of two machines; the fourth engine is the second one there, and the fifth has no rank."""
    engines = [HolderInfo(node=node) for node in ("here", "here", "there", "there", "elsewhere", "here")]
    routes = plan_routes("auto", engines, [HERE, HERE, THERE, THERE], **SHARED_CPU)
    assert [route.sources for route in routes] == [(0,), (1,), (2,), (3,), (0,), (0,)]
    assert [route.transport for route in routes] == [*["shared_memory"] * 4, "broadcast", "shared_memory"]


@pytest.mark.parametrize("strategy", ["auto", "cuda_ipc"])
def test_each_gpu_is_served_by_rank_on_same_gpu(strategy):
    """Ranks are numbered otherwise than GPUs, and the second engine spreads over two of them."""
    ranks = [RankLocation(node="here", gpu=gpu) for gpu in "dbac"]
    engines = [HolderInfo(node="here", gpus=gpus) for gpus in (["a"], ["b", "c"], ["d"])]
    routes = plan_routes(strategy, engines, ranks, **SHARED_GPU)
    assert routes == [Route("cuda_ipc", sources=sources) for sources in ((2,), (1, 3), (0,))]


def test_engine_with_unknown_gpus_may_use_any_handle_of_machine():
    ranks = [RankLocation(node=node, gpu=gpu) for node, gpu in (("here", "a"), ("there", "b"), ("here", "c"))]
    assert plan_routes("auto", [HolderInfo(node="here")], ranks, **SHARED_GPU) == [Route("cuda_ipc", sources=(0, 2))]


def test_engine_on_gpu_without_rank_is_served_through_host():
    ranks = [RankLocation(node="here", gpu="a")]
    engines = [HolderInfo(node="here", gpus=["a", "b"])]
    assert plan_routes("auto", engines, ranks, **SHARED_GPU) == [Route("shared_memory")]


@pytest.mark.parametrize("node, transport", [("here", "shared_memory"), ("there", "broadcast")])
def test_deltas_are_sent_by_rank_0_only(node: str, transport: str):
    engines = [HolderInfo(node="here"), HolderInfo(node=node)]
    routes = plan_routes("delta", engines, [HERE, RankLocation(node="there")], **SHARED_CPU)
    assert routes == [Route(transport, "delta")] * 2  # type: ignore[arg-type]


# ---- init infos


def test_group_ranks_count_engine_processes():
    engines = [HolderInfo(num_weight_processes=count) for count in (2, 1, 8, 4)]
    routes = [Route("broadcast"), Route("broadcast"), Route("shared_memory", sources=(3,)), Route("broadcast")]
    infos = init_infos_for(routes, engines, master_address="127.0.0.1", master_port=7, backend="gloo")
    assert [info.rank for info in infos if info.transport == "broadcast"] == [1, 3, 4]  # engine 0: ranks 1 and 2
    assert {(info.world_size, info.master_port) for info in infos} == {(8, 7)}
    assert [info.sources for info in infos] == [(0,), (0,), (3,), (0,)]


def test_init_info_has_route_and_settings():
    [info] = init_infos_for(
        [Route("shared_memory", "delta")], [HolderInfo()], directory="/d", verification="full", timeout_seconds=3.0
    )
    assert (info.transport, info.encoding, info.directory) == ("shared_memory", "delta", "/d")
    assert (info.verification, info.timeout_seconds) == ("full", 3.0)


@pytest.mark.parametrize(
    "transport, lacks, refused",
    [
        ("broadcast", {"broadcast": "no route for it"}, True),
        ("shared_memory", {"broadcast": "no route for it"}, False),
        ("shared_memory", {"weight_update": "read-only"}, True),
    ],
)
def test_unsupported_engine_is_named_with_reason(transport, lacks: dict[str, str], refused: bool):
    engines = [HolderInfo(), HolderInfo(backend="sglang", unsupported=lacks)]
    routes = [Route(transport)] * 2
    if not refused:
        assert len(init_infos_for(routes, engines)) == 2
        return
    with pytest.raises(ConfigError, match="weight_sync_strategy"):
        init_infos_for(routes, engines)
