"""`python -m skyrl_train.explain.ray_state ADDRESS`: resources of a Ray cluster and what waits for them, as JSON.

Asks the cluster's control store alone: a driver that joined the cluster would wait for the same resources. The module
that holds these tables is Ray's own, as the public interface needs Ray's dashboard.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any


def ray_state(address: str) -> dict[str, Any]:
    """Return `total` and `free` resources, and `waiting`: actors and placement groups that have no place."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions  # pyright: ignore[reportAttributeAccessIssue]  compiled, without types

    state = GlobalState()
    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    waiting = [
        f"actor {actor['ActorClassName']} ({actor['State']})"
        for actor in state.actor_table(None).values()
        if actor["State"] in ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")
    ]
    waiting += [
        f"placement group {group['name']} of {_described(group['bundles'].values())} ({group['state']})"
        for group in state.placement_group_table().values()
        if group["state"] in ("PENDING", "RESCHEDULING", "PREPARED")
    ]
    return {"total": _plain(state.cluster_resources()), "free": _plain(state.available_resources()), "waiting": waiting}


def _described(bundles: Any) -> str:
    bundles = list(bundles)
    return f"{len(bundles)} x {bundles[0]}" if bundles else "no bundles"


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out what no process of a run asks for: memory, and a resource for each node and placement group."""
    own = ("node:", "memory", "object_store_memory")
    return {name: value for name, value in resources.items() if not name.startswith(own) and "_group_" not in name}


if __name__ == "__main__":
    print(json.dumps(ray_state(sys.argv[1])))
