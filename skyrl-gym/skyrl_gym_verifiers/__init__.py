"""Plugins for the verifiers package, which finds them by the name of this one (a dot in it is not allowed there):

- the taskset `skyrl_gym_verifiers`, which plays any environment of skyrl_gym:

      vf-eval skyrl_gym_verifiers --env.taskset.env-id gsm8k --env.taskset.data rows.jsonl

- the harness `skyrl_gym_verifiers`: a chat loop with tools inside verifiers' own process.
"""

from skyrl_gym_verifiers.harness import InProcessHarness
from skyrl_gym_verifiers.taskset import RowEnv, RowTaskset

__all__ = ["InProcessHarness", "RowEnv", "RowTaskset"]
