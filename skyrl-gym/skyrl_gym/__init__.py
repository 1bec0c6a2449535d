"""Text environments, tools and graders for reinforcement learning of language models."""

from importlib.metadata import version

from skyrl_gym import envs, error, tools
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import deregister, make, pprint_registry, register, registry, spec

__all__ = ["Env", "deregister", "envs", "error", "make", "pprint_registry", "register", "registry", "spec", "tools"]

__version__ = version("skyrl-gym")
