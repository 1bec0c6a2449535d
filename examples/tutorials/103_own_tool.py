"""Tutorial 103: a custom tool, called in a conversation of two turns.

python examples/tutorials/103_own_tool.py
"""

import random

from tiny_run import prepare, print_curve, settings, train_on_demonstrations, write_rows

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ground_truth_of
from skyrl_gym.tools import ToolGroup, tool
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.utils.run_folder import RunFolder

THINGS = ["tea", "jam"]


# A tool is a method; its name, type hints and docstring are the JSON schema that a larger model would be shown.
class Shop(ToolGroup):
    def __init__(self) -> None:
        super().__init__("shop")
        self.orders: list[str] = []

    @tool
    def get(self, thing: str) -> str:
        """Order a thing."""
        self.orders.append(thing)
        return "ok"


# The environment reads the call out of the model's text, answers with the tool's result, and rewards the right order.
class ShopEnv(BaseTextEnv):
    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.wanted = str(ground_truth_of(extras or {}))
        self.shop = Shop()
        self.init_tool_groups([self.shop])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if self.turns == 1 and action.startswith("get "):
            result = {"role": "user", "content": self._execute_tool("shop", "get", [action.removeprefix("get ")])}
            return BaseTextEnvStepOutput(observations=[result], reward=0.0, done=False, metadata={})
        is_right = self.shop.orders == [self.wanted]
        return BaseTextEnvStepOutput(observations=[], reward=float(is_right), done=True, metadata={})


# A call must happen before it can be rewarded, and random weights never write one. Demonstrations show the form: most
# refuse, and those that order are right three times in four.
def demonstration(draw: random.Random) -> list[dict[str, str]]:
    question = {"role": "user", "content": (wanted := draw.choice(THINGS))}
    if draw.random() < 0.6:
        return [question, {"role": "assistant", "content": "no"}]
    call = {"role": "assistant", "content": f"get {wanted if draw.random() < 0.5 else draw.choice(THINGS)}"}
    return [question, call, {"role": "user", "content": "ok"}, {"role": "assistant", "content": "done"}]


folder, draw = prepare("103"), random.Random(0)
model = train_on_demonstrations(folder, [demonstration(draw) for _ in range(1024)], steps=60)

# Reinforcement learning then finds out what pays. Only the model's own tokens train: in the dashboard, colour a sample
# by "loss mask" to see that the tool's result does not.
rows = [{"prompt": [{"role": "user", "content": thing}], "reward_spec": {"ground_truth": thing}} for thing in THINGS]
write_rows(folder, 32 * rows)
skyrl_gym.register(id="shop", entry_point=ShopEnv)
cfg = settings(
    folder,
    "environment.env_class=shop",
    "generator.max_turns=2",
    "generator.max_input_length=64",
    f"trainer.policy.model.path={model}",
    "trainer.policy.optimizer_config.lr=2e-3",
    "trainer.max_training_steps=20",
)
run_experiment(cfg)
rewards = print_curve(cfg.trainer.run_dir)
turns = [row["generate/avg_num_turns"] for row in RunFolder(cfg.trainer.run_dir).read_metrics()]
print("turns (2: with a call):", [round(value, 2) for value in turns])
