"""What the environment sets, since it belongs to the cluster or is a secret. Imports nothing of ours."""

import os


def scheduling_timeout_seconds() -> float:
    """`SKYRL_RAY_PG_TIMEOUT_IN_S` (180): how long processes may wait for a place in the cluster and start."""
    return float(os.environ.get("SKYRL_RAY_PG_TIMEOUT_IN_S", "180"))


def endpoint_api_key() -> str | None:
    """`SKYRL_ENDPOINT_API_KEY` (none): what clients of the OpenAI-compatible endpoint must send as their key."""
    return os.environ.get("SKYRL_ENDPOINT_API_KEY") or None


ENGINE_API_KEY = "SKYRL_ENGINE_API_KEY"


def engine_api_key() -> str | None:
    """`SKYRL_ENGINE_API_KEY` (none): the key of rollout servers started elsewhere, for them and for the trainer."""
    return os.environ.get(ENGINE_API_KEY) or None
