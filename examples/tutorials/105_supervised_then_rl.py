"""Tutorial 105: supervised training on demonstrations, then reinforcement learning from its result.

python examples/tutorials/105_supervised_then_rl.py
"""

import random
from typing import Any

from tiny_run import prepare, print_curve, settings, train_on_demonstrations, write_rows

from skyrl_gym.envs.arithmetic.problems import make_problems
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.utils.run_folder import RunFolder

# Sums of digits up to 3, 16 in all. A model with random weights never writes `<answer>5</answer>` by chance: all
# rewards would be 0, and from equal rewards nothing can be learned. Demonstrations give it the form of an answer.
folder, draw = prepare("105"), random.Random(0)
problems = make_problems(4000, num_digits=1, instruction="")
problems = [row for row in problems if set(str(row["extra_info"]["problem"])) <= set("0123+")]


# These demonstrations are sloppy: most repeat the first number, and only some add. Supervised training learns both.
def demonstration(row: dict[str, Any]) -> list[dict[str, str]]:
    left, right = map(int, row["extra_info"]["problem"].split("+"))
    shown = left + right if draw.random() < 0.3 else left
    return [*row["prompt"], {"role": "assistant", "content": f"<answer>{shown}</answer>"}]


# 100 steps on batches of 64 (`main_sft`). The loss cannot reach 0: which answer a demonstration shows is chance.
model = train_on_demonstrations(folder, [demonstration(row) for row in problems], steps=100)
losses = [row["train/loss"] for row in RunFolder(folder / "supervised").read_metrics()]
print(f"supervised loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# Reinforcement learning starts from the export. The reward tells the two ways apart, and the wrong one disappears.
write_rows(folder, problems)
cfg = settings(
    folder,
    "environment.env_class=arithmetic",
    f"trainer.policy.model.path={model}",
    "trainer.policy.optimizer_config.lr=2e-3",
    "trainer.train_batch_size=16",
    "trainer.max_training_steps=20",
)
run_experiment(cfg)
rewards = print_curve(cfg.trainer.run_dir)
