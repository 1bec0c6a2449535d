"""Ranks take their places node by node, however Ray has laid them."""

import os
import random
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.bundles import groups_across_nodes, nodes_of_run, order_by_node, reserve_bundles
from skyrl_train.orchestration.ray_launcher import RayRanks


def shuffled_nodes(num_nodes: int, per_node: int, seed: int) -> list[str]:
    """The node of each bundle, in no order."""
    nodes = [f"node {index // per_node}" for index in range(num_nodes * per_node)]
    random.Random(seed).shuffle(nodes)
    return nodes


@pytest.mark.parametrize("seed", range(20))
def test_ranks_of_four_nodes_form_blocks_of_eight(seed: int):
    nodes = shuffled_nodes(4, 8, seed)
    assert groups_across_nodes(nodes, 8), "else nothing is shown"
    order = order_by_node(nodes)
    assert sorted(order) == list(range(32)), "each bundle is taken once"
    of_ranks = [nodes[bundle] for bundle in order]
    for size in (2, 4, 8):
        assert groups_across_nodes(of_ranks, size) == []
    assert order[0] == 0, "the first bundle's node comes first"


def test_bundle_order_within_node_is_kept():
    assert order_by_node(["b", "a", "b", "a"]) == [0, 2, 1, 3]
    assert order_by_node(["b", "b", "a"]) == [0, 1, 2]
    assert order_by_node(["only"] * 3) == [0, 1, 2]


def test_groups_spanning_nodes_are_named():
    """A node with three free GPUs and one with five: of groups of four the first spans both."""
    nodes = ["a"] * 3 + ["b"] * 5
    assert groups_across_nodes(nodes, 4) == [range(4)]
    assert groups_across_nodes(nodes, 8) == [], "wider than a node: it was asked for"
    assert groups_across_nodes(["a"] * 4 + ["b"] * 4, 4) == []


def count_placed_groups() -> int:
    return sum(entry["state"] in ("CREATED", "PENDING") for entry in placement_group_table().values())


@pytest.mark.slow
def test_ranks_acquire_all_slots_or_none_and_release_them(ray_cpu: None, tmp_path: Path):
    before = count_placed_groups()
    asked = int(ray.cluster_resources()["CPU"]) + 1
    with pytest.raises(WorkerError, match=rf"{asked} CPUs for the ranks of policy"):
        reserve_bundles(asked, "cpu", purpose="the ranks of policy", timeout_seconds=0.5)
    assert count_placed_groups() == before
    ranks = RayRanks("policy", dict, (), num_ranks=3, device="cpu", log_folder=tmp_path)
    assert count_placed_groups() == before + 1
    assert ranks.nodes == nodes_of_run() * 3
    ranks.kill()
    assert count_placed_groups() == before


@pytest.mark.slow
def test_processes_of_own_cluster_have_driver_priority(ray_cpu: None):
    """Beside other programs of the machine, Ray's default (nice 15) would leave a run behind all of them."""
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)
