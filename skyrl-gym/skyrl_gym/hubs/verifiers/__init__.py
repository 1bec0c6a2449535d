"""Environments of the verifiers package (release 0.4: `verifiers.v1`) as text environments, and rows of their tasks.

The opposite direction, a text environment as a verifiers environment, is the package `skyrl_gym_verifiers`.
"""

from skyrl_gym.hubs.verifiers.env import VerifiersConfig, VerifiersEnv
from skyrl_gym.hubs.verifiers.rows import verifiers_rows

__all__ = ["VerifiersConfig", "VerifiersEnv", "verifiers_rows"]
