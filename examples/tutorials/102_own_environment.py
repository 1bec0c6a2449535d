"""Tutorial 102: a custom environment: rows, rewards, a check of the contract, a run.

python examples/tutorials/102_own_environment.py
"""

from tiny_run import prepare, print_curve, settings, write_rows

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of
from skyrl_train.entrypoints.main_base import run_experiment

KINDS = {"digits": "0123456789", "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


# An environment is made anew for each answer. `extras` is the row without its prompt: here the kind of characters.
class KindEnv(BaseTextEnv):
    """Reward for characters of the asked kind: their share among the first 8."""

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.wanted = KINDS[str(ground_truth_of(extras or {}))]
        self.num_right = 0

    # `step` reads one turn of the model. This task has a single turn, so it is done at once. Partial rewards matter: a
    # model with random weights never writes eight digits, but now and then it writes one.
    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.num_right = sum(character in self.wanted for character in action[:8])
        return BaseTextEnvStepOutput(observations=[], reward=self.num_right / 8, done=True, metadata={})

    # `get_metrics` becomes curves of the run, `environment/...`.
    def get_metrics(self) -> dict[str, object]:
        return {"num_right": self.num_right}

    # Examples with perfect answers, for the checks.
    @classmethod
    def examples(cls) -> list[Example]:
        return [Example.ruled(f"write {kind}", kind, characters[:8]) for kind, characters in KINDS.items()]


# The check plays hostile and broken inputs, and raises with a list of what the environment gets wrong.
# `python -m skyrl_gym.audit MODULE:CLASS` then plays policies that cheat.
skyrl_gym.register(id="kinds", entry_point=KindEnv)
skyrl_gym.check_env("kinds")

# Rows: the prompt, and what the environment needs to know.
folder = prepare("102")
rows = [{"prompt": each.prompt, **each.extras} for each in KindEnv.examples()]
write_rows(folder, 32 * rows)

cfg = settings(folder, "environment.env_class=kinds", "trainer.max_training_steps=25")
run_experiment(cfg)

# Capitals pay more by chance, as there are more of them, so the model first writes capitals whatever is asked; then it
# reads the prompt. The dashboard's page of a step shows the rewards of each prompt's group.
rewards = print_curve(cfg.trainer.run_dir)
