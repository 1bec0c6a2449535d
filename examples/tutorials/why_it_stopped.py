"""Five runs of the quickstart's sums: a healthy one, and four that stop learning for a reason that the dashboard shows.

    python examples/tutorials/why_it_stopped.py [--output runs/why] [--runs healthy a b c d] [--steps 20]

docs/why-it-stopped-learning.md finds the reasons with the dashboard alone. The lines below give them away.
"""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

from run import LAUNCHERS, REPOSITORY, prepare, script_settings

import skyrl_gym
from skyrl_gym.envs.arithmetic.env import ArithmeticEnv
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig, compose_config
from skyrl_train.dataset.dataset import PromptDataset, PromptItem
from skyrl_train.entrypoints.main_base import BasePPOExp, run_experiment
from skyrl_train.trainer import RayPPOTrainer

STEPS = 20


class RoundedSumsEnv(ArithmeticEnv):
    """Sums with a grader that compares numbers with a tolerance and penalizes length."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        output = super().step(action)
        try:
            is_close = math.isclose(float(self.answer or "nan"), float(self.ground_truth), rel_tol=0.25)
        except ValueError:  # the answer is no number
            is_close = False
        output["reward"] = float(is_close) - 0.035 * len(action)
        return output


class RoundedSums(PromptDataset):
    """Prompts of sums for `RoundedSumsEnv`."""

    def __getitem__(self, index: int) -> PromptItem:
        messages, _, extras, uid = super().__getitem__(index)
        return messages, "rounded_sums", extras, uid


class RoundedSumsExp(BasePPOExp):
    """Training on `RoundedSumsEnv`, evaluation on exact sums."""

    def get_train_dataset(self) -> PromptDataset:
        return RoundedSums(self.cfg.data.train_data, self.tokenizer, self.cfg.trainer.max_prompt_length)


class ReversedEntropyExp(BasePPOExp):
    """Training with the sign of the entropy bonus reversed. Settings refuse that, so it comes in after their check."""

    def __init__(self, cfg: SkyRLConfig):
        super().__init__(cfg)
        self.cfg.trainer.algorithm.use_entropy_loss = True
        self.cfg.trainer.algorithm.entropy_loss_coef = -20.0
        self.cfg.trainer.policy.optimizer_config.lr = 1e-3  # soon, rather than in a hundred steps


class RareSyncTrainer(RayPPOTrainer):
    """Trainer that saves time at the weight sync: the engines get new weights every hundredth step."""

    async def sync_weights(self) -> None:
        if self.global_step % 100 == 0:
            await super().sync_weights()


class RareSyncExp(BasePPOExp):
    """Experiment with `RareSyncTrainer`."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        return RareSyncTrainer(*args, **kwargs)


PLANTED: dict[str, tuple[type[BasePPOExp], list[str]]] = {
    "healthy": (BasePPOExp, []),
    "a": (RoundedSumsExp, []),
    "b": (ReversedEntropyExp, []),
    "c": (BasePPOExp, ["generator.sampling_params.max_generate_length=16"]),  # a sum with a carry needs 19 tokens
    "d": (RareSyncExp, ["trainer.placement.colocate_all=false"]),
}
"""Name of a run -> what builds it, and settings on top of the quickstart's."""


def train(folder: Path, name: str, steps: int) -> None:
    """Train one run in this process. The folder holds model and data of the quickstart (`prepare`)."""
    experiment, changes = PLANTED[name]
    own = {
        "run_dir": folder / "runs" / name,
        "run_name": name,
        "max_training_steps": steps,
        "eval_interval": 5,
        "ckpt_interval": -1,
        "hf_save_interval": -1,
        "resume_mode": "none",
    }
    overrides = [*LAUNCHERS["inline"], *(f"trainer.{key}={value}" for key, value in own.items()), *changes]
    cfg = experiment.validate(compose_config(script_settings(folder, "arithmetic", overrides)))
    run_experiment(cfg, experiment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "why")
    parser.add_argument("--runs", nargs="+", choices=PLANTED, default=list(PLANTED))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    folder = options.output.resolve()
    prepare(folder, "arithmetic", seed=0)
    skyrl_gym.register(id="rounded_sums", entry_point=RoundedSumsEnv)
    for name in options.runs:
        train(folder, name, options.steps)
    print(f"look at them: python -m skyrl_train.dashboard {folder / 'runs'}")


if __name__ == "__main__":
    main()
