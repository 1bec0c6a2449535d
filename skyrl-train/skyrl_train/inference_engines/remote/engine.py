"""Rollout engines that are servers started elsewhere: the names that others use."""

from skyrl_train.inference_engines.remote.check import check_server
from skyrl_train.inference_engines.remote.handles import RemoteEngines
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine

__all__ = ["RemoteEngines", "RemoteInferenceEngine", "check_server"]
