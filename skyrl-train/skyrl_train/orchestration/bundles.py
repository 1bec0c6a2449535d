"""Gang scheduling: all bundles of a group are reserved together and ordered by node. Uses Ray; independent of models.

Ray places the bundles of a placement group on nodes in arbitrary order. Ranks that benefit from locality (sequence
parallelism, one replica of a sharded model) use them sorted by node.
"""

import uuid
from collections.abc import Sequence

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from skyrl_gym.waits import waiting
from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.errors import WorkerError
from skyrl_train.utils.explanations import SCHEDULER, write_explanation


def reserve_bundles(
    count: int, device: str, *, num_devices: int = 1, purpose: str, timeout_seconds: float | None = None
) -> PlacementGroup:
    """Reserve `count` bundles together, each with a CPU and on CUDA `num_devices` GPUs of one node, on as few nodes as
    possible.

    Args:
        device: "cpu" or "cuda".
        purpose: name of the group and the settings that determine its size, for errors.

    Raises:
        WorkerError: the cluster could not provide all of them in time; none is kept.
    """
    timeout = scheduling_timeout_seconds() if timeout_seconds is None else timeout_seconds
    bundle = {"CPU": 1.0} if device == "cpu" else {"CPU": 1.0, "GPU": float(num_devices)}
    group = placement_group([bundle] * count, strategy="PACK", name=f"{_get_name_prefix()}{uuid.uuid4().hex}")
    kind = "CPU" if device == "cpu" else "GPU"
    asked = f"{count} CPUs" if device == "cpu" else f"{count * num_devices} GPUs"
    with waiting(f"{asked} for {purpose}", on=SCHEDULER, deadline=timeout):
        if not group.wait(timeout):
            late = (
                f"{asked} for {purpose} did not become free within {timeout:g} s (SKYRL_RAY_PG_TIMEOUT_IN_S); the "
                f"cluster has {ray.cluster_resources().get(kind, 0):g}, of which "
                f"{ray.available_resources().get(kind, 0):g} are free"
            )
            why = write_explanation(late)
            remove_placement_group(group)
            raise WorkerError(late + why)
    return group


def nodes_of_bundles(group: PlacementGroup) -> list[str]:
    """Return the node id of each bundle of a placed group."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in range(group.bundle_count)]


def nodes_of_run() -> list[str]:
    """Return the ids of all nodes on which this run has reserved bundles."""
    placed = [
        entry["bundles_to_node_id"].values()
        for entry in placement_group_table().values()
        if entry["state"] == "CREATED" and entry["name"].startswith(_get_name_prefix())
    ]
    return sorted({node for nodes in placed for node in nodes})


def _get_name_prefix() -> str:
    """Return the prefix of the names of this run's placement groups; other runs may share the cluster."""
    return f"skyrl-{ray.get_runtime_context().get_job_id()}-"


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Order bundles so that bundles of a node are consecutive: nodes in order of first appearance, bundles of a node by
    index.

    Args:
        nodes: the node of each bundle.
    """
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], bundle))


def groups_across_nodes(nodes: Sequence[str], size: int) -> list[range]:
    """Return the groups of `size` consecutive ranks that span several nodes although one node could hold them.

    Args:
        nodes: the node of each rank.
    """
    if size > max(list(nodes).count(node) for node in set(nodes)):
        return []  # wider than any node: no placement could avoid it
    groups = [range(first, first + size) for first in range(0, len(nodes), size)]
    return [group for group in groups if len({nodes[rank] for rank in group}) > 1]
