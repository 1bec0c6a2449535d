"""A user's own entry point: registers an environment, then trains. Started by tests as a process."""

import hydra
from omegaconf import DictConfig

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.entrypoints.main_base import config_dir, run_experiment


class LengthOfAnswer(BaseTextEnv):
    """Likes answers with many different characters: a reward that a tiny model gets some of from the start."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=len(set(action)) / 20, done=True, metadata={})


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    skyrl_gym.register(id="length_of_answer", entry_point=LengthOfAnswer)
    run_experiment(cfg)


if __name__ == "__main__":
    main()
