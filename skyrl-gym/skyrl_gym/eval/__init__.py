"""Evaluation of a model on an environment. Plays episodes with any OpenAI-compatible endpoint.

From a shell: `python -m skyrl_gym.eval --env gsm8k --base-url URL --model NAME --data test.parquet`.
"""

from skyrl_gym.eval.endpoint import ChatEndpoint, EndpointRefused, ModelError, Reply
from skyrl_gym.eval.runner import Stopped, evaluate
from skyrl_gym.eval.settings import EvalSettings
from skyrl_gym.eval.statistics import Estimate, pass_at_k
from skyrl_gym.eval.summary import Summary

__all__ = [
    "ChatEndpoint",
    "EndpointRefused",
    "Estimate",
    "EvalSettings",
    "ModelError",
    "Reply",
    "Stopped",
    "Summary",
    "evaluate",
    "pass_at_k",
]
