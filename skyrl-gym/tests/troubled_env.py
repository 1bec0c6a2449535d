"""An environment in which things go wrong when the model says so. Importable, so that spawned processes find it."""

import os
import time

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.error import InfraError, TaskError


class TroubledError(Exception):
    """Does not survive pickling: its constructor wants two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class TroubledEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.name = (extras or {}).get("name", "")
        self.pid = os.getpid()
        if self.name == "bad row":
            raise TaskError("name must not be 'bad row'")

    def init(self, prompt, seed=None):
        if self.name == "hangs in init":
            time.sleep(3600)
        return [{"role": "user", "content": f"{prompt[0]['content']} {self.name} {seed}"}], {}

    def step(self, action):
        self.turns += 1
        if action == "raise":
            raise InfraError("the server is down")
        if action == "raise oddly":
            raise TroubledError("one", "two")
        if action == "hang":
            time.sleep(3600)
        if action == "die":
            os._exit(3)
        if action == "answer wrongly":
            return None
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": f"{self.name}: {action}"}],
            reward=float(self.turns),
            done=action == "end",
            metadata={"pid": self.pid},
        )

    def get_metrics(self):
        return {"turns": self.turns}
