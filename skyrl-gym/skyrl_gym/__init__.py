"""Text environments, tools and graders for reinforcement learning of language models."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from skyrl_gym import envs, error, tools
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import deregister, make, pprint_registry, register, registry, spec

if TYPE_CHECKING:
    from skyrl_gym.check import check_env

__all__ = [
    "Env",
    "check_env",
    "deregister",
    "envs",
    "error",
    "make",
    "pprint_registry",
    "register",
    "registry",
    "spec",
    "tools",
]

__version__ = version("skyrl-gym")


def __getattr__(name: str) -> object:
    # Imported when used: authors need it and rollouts do not, so `import skyrl_gym` stays quick.
    if name == "check_env":
        return import_module("skyrl_gym.check").check_env
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
