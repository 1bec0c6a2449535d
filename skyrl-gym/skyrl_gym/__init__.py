"""Text environments, tools and graders for reinforcement learning of language models."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from skyrl_gym import envs, error, tools
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import deregister, make, pprint_registry, register, registry, spec

if TYPE_CHECKING:
    from skyrl_gym.check import check_env
    from skyrl_gym.vector import make_vec

__all__ = [
    "Env",
    "check_env",
    "deregister",
    "envs",
    "error",
    "make",
    "make_vec",
    "pprint_registry",
    "register",
    "registry",
    "spec",
    "tools",
]

__version__ = version("skyrl-gym")

_IMPORTED_WHEN_USED = {"check_env": "skyrl_gym.check", "make_vec": "skyrl_gym.vector"}
"""What authors need and rollouts do not: `import skyrl_gym` stays quick."""


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_WHEN_USED:
        return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
