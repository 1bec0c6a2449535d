"""Every environment variable this package reads. Imports nothing of ours."""

import os


def scheduling_timeout_seconds() -> float:
    """`SKYRL_RAY_PG_TIMEOUT_IN_S` (180): how long processes may wait for a place in the cluster and start."""
    return float(os.environ.get("SKYRL_RAY_PG_TIMEOUT_IN_S", "180"))


def log_level() -> str:
    """`LOG_LEVEL` (INFO)."""
    return os.environ.get("LOG_LEVEL", "INFO")
