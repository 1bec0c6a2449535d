"""Deadlines set by the environment: they depend on the cluster, not on the run. Imports nothing of ours."""

import os


def scheduling_timeout_seconds() -> float:
    """`SKYRL_RAY_PG_TIMEOUT_IN_S` (180): how long processes may wait for a place in the cluster and start."""
    return float(os.environ.get("SKYRL_RAY_PG_TIMEOUT_IN_S", "180"))
