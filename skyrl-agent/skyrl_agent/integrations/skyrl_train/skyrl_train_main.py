"""`python -m skyrl_agent.integrations.skyrl_train.skyrl_train_main generator.task=FILE.yaml key=value …`: trains the
agent of a task file. `skyrl_train.entrypoints.main_base` does the same; this module also knows the advantage estimator
`loop` (leave one out), as published recipes name it."""

import multiprocessing

import hydra
from omegaconf import DictConfig

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry, EstimatorRequirements, rloo_advantages
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, run_experiment, validate_cfg
from skyrl_train.errors import ConfigError

if "loop" not in AdvantageEstimatorRegistry:
    AdvantageEstimatorRegistry.register("loop", rloo_advantages, requires=EstimatorRequirements(critic=False))


class SkyRLAgentPPOExp(BasePPOExp):
    """Experiment that uses the agent of `generator.task` as its generator."""


def validate_agent_cfg(cfg: SkyRLConfig | DictConfig) -> SkyRLConfig:
    """Validate settings; `generator.task` must name a task file."""
    typed = validate_cfg(cfg)
    if typed.generator.task is None:
        raise ConfigError("generator.task is missing: set it to a task file")
    return typed


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    """Run the command line."""
    run_experiment(cfg, SkyRLAgentPPOExp, validate_agent_cfg)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
