"""Training one step off: the groups of step t + 1 are generated with the weights of step t - 1 while step t trains."""

import multiprocessing

import hydra
from omegaconf import DictConfig

from skyrl_train.config import SkyRLConfig, get_config_as_dict
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, run_experiment, validate_cfg

ONE_STEP_OFF = {"enabled": True, "max_staleness_steps": 1, "order": "exact", "pause": "wait"}
"""Values of `trainer.fully_async`."""


class AsyncPPOExp(BasePPOExp):
    """Experiment that trains one step off, whatever `trainer.fully_async` says of these settings."""

    @staticmethod
    def validate(cfg: SkyRLConfig | DictConfig) -> SkyRLConfig:
        settings = get_config_as_dict(cfg)
        settings["trainer"]["fully_async"] |= ONE_STEP_OFF
        return validate_cfg(SkyRLConfig.from_dict(settings))


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg, AsyncPPOExp, AsyncPPOExp.validate)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
