"""Placement decides how weights travel, and each engine gets ranks of its own."""

from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.weight_sync.plan import choose_transport, init_infos_for
from skyrl_train_testing.weight_holders import HolderInfo

SHARED_CPU: dict[str, Any] = {"colocated": True, "device": "cpu", "remote": False, "same_node": True}
SHARED_GPU = SHARED_CPU | {"device": "cuda"}
APART_CPU = SHARED_CPU | {"colocated": False}
OTHER_NODE = SHARED_GPU | {"same_node": False}
REMOTE: dict[str, Any] = {"colocated": False, "device": "cpu", "remote": True, "same_node": False}
REMOTE_HERE = REMOTE | {"same_node": True}


@pytest.mark.parametrize(
    "strategy, where, expected",
    [
        ("auto", SHARED_CPU, ("shared_memory", "full")),
        ("auto", SHARED_GPU, ("cuda_ipc", "full")),
        ("auto", SHARED_GPU | {"one_device": False}, ("shared_memory", "full")),
        ("auto", APART_CPU, ("broadcast", "full")),
        ("auto", APART_CPU | {"device": "cuda"}, ("broadcast", "full")),
        ("auto", OTHER_NODE, ("broadcast", "full")),  # engines of a shared cluster that landed elsewhere
        ("auto", REMOTE, ("checkpoint", "full")),
        ("auto", REMOTE_HERE, ("checkpoint", "full")),
        ("delta", SHARED_CPU, ("shared_memory", "delta")),
        ("delta", SHARED_GPU, ("shared_memory", "delta")),
        ("delta", APART_CPU, ("broadcast", "delta")),
        ("delta", REMOTE, ("checkpoint", "delta")),
        ("shared_memory", APART_CPU, ("shared_memory", "full")),
        ("shared_memory", REMOTE_HERE, ("shared_memory", "full")),
        ("cuda_ipc", SHARED_GPU, ("cuda_ipc", "full")),
        ("broadcast", SHARED_CPU, ("broadcast", "full")),
        ("broadcast", REMOTE, ("broadcast", "full")),
        ("checkpoint", SHARED_CPU, ("checkpoint", "full")),
    ],
)
def test_the_way_of_each_strategy(strategy, where: dict[str, Any], expected: tuple[str, str]):
    assert choose_transport(strategy, **where) == expected


@pytest.mark.parametrize(
    "strategy, where, why",
    [
        ("shared_memory", OTHER_NODE, "on one machine. Use generator.weight_sync_strategy=broadcast"),
        ("shared_memory", REMOTE, "on one machine. Use generator.weight_sync_strategy=checkpoint"),
        ("cuda_ipc", SHARED_CPU, "needs models on cuda; they are on cpu"),
        ("cuda_ipc", SHARED_GPU | {"colocated": False}, "on the workers' GPUs"),
        ("cuda_ipc", REMOTE_HERE | {"device": "cuda"}, "on the workers' GPUs"),
        ("cuda_ipc", SHARED_GPU | {"one_device": False}, "serves one GPU"),
    ],
)
def test_a_way_that_cannot_work_is_refused_with_one_that_does(strategy, where: dict[str, Any], why: str):
    with pytest.raises(ConfigError) as raised:
        choose_transport(strategy, **where)
    assert f"generator.weight_sync_strategy={strategy}" in str(raised.value) and why in str(raised.value)


def test_adapters_take_no_transport():
    with pytest.raises(ValueError, match="adapters are files"):
        choose_transport("adapter", **SHARED_CPU)


def test_ranks_count_the_processes_of_all_engines():
    engines = [HolderInfo(num_weight_processes=count) for count in (2, 1, 4)]
    infos = init_infos_for("broadcast", "full", engines, master_address="127.0.0.1", master_port=7, backend="gloo")
    assert [info.rank for info in infos] == [0, 1, 3, 4]  # engine 0: ranks 1 and 2
    assert {(info.world_size, info.master_port) for info in infos} == {(8, 7)}


def test_init_info_has_the_address_and_ranks_of_each_side():
    infos = init_infos_for(
        "shared_memory", "delta", [HolderInfo()], directory="/d", verification="full", timeout_seconds=3.0
    )
    assert {(i.transport, i.encoding, i.directory, i.verification, i.timeout_seconds) for i in infos} == {
        ("shared_memory", "delta", "/d", "full", 3.0)
    }


@pytest.mark.parametrize(
    "transport, lacks, refused",
    [
        ("broadcast", {"broadcast": "no route for it"}, True),
        ("shared_memory", {"broadcast": "no route for it"}, False),
        ("shared_memory", {"weight_update": "read-only"}, True),
    ],
)
def test_an_engine_that_cannot_take_part_is_named_with_its_reason(transport, lacks: dict[str, str], refused: bool):
    engines = [HolderInfo(), HolderInfo(backend="sglang", unsupported=lacks)]
    if not refused:
        assert len(init_infos_for(transport, "full", engines)) == 3
        return
    with pytest.raises(ConfigError, match=r"weight_sync_strategy: engine 1 \(sglang\) .*: (no route|read-only)"):
        init_infos_for(transport, "full", engines)
