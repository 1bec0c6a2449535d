"""Tutorial 106: asynchronous training: generation continues while the model is updated.

python examples/tutorials/106_asynchronous.py
"""

import asyncio

from tiny_run import DigitsEnv, digit_rows, prepare, print_curve, settings, write_rows

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.utils.run_folder import RunFolder


# Answers take unequal time: here every fourth environment answers late. A synchronous step waits for the last of them.
class SlowDigitsEnv(DigitsEnv):
    """`DigitsEnv` with a grader that is sometimes slow."""

    num_made = 0

    async def step(self, action: str) -> BaseTextEnvStepOutput:
        SlowDigitsEnv.num_made += 1
        await asyncio.sleep(0.2 if SlowDigitsEnv.num_made % 4 == 0 else 0.0)
        return super().step(action)


folder = prepare("106")
write_rows(folder, digit_rows())
skyrl_gym.register(id="slow_digits", entry_point=SlowDigitsEnv)

# Three settings make a run asynchronous: the switch, engines and trainer on devices of their own, and a loss that
# corrects for tokens that older weights wrote. At most one step old here (`max_staleness_steps`).
cfg = settings(
    folder,
    "environment.env_class=slow_digits",
    "trainer.max_training_steps=20",
    "trainer.fully_async.enabled=true",
    "trainer.placement.colocate_all=false",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
    "trainer.fully_async.max_staleness_steps=1",
)
run_experiment(cfg)
rewards = print_curve(cfg.trainer.run_dir)

# How old the trained answers were, and how busy the trainer was. In the dashboard, page "Time" draws both: the lanes of
# groups go on under "trains".
metrics = RunFolder(cfg.trainer.run_dir).read_metrics()
staleness = [row["async/staleness_mean"] for row in metrics]
print("mean age in steps:", [round(value, 2) for value in staleness])
print("trainer busy:", [round(row["async/trainer_utilisation"], 2) for row in metrics])
