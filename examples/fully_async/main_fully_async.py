"""Fully asynchronous training for commands of releases without a switch: `main_base` with
`trainer.fully_async.enabled=true`."""

import multiprocessing

import hydra
from omegaconf import DictConfig

from skyrl_train.config import SkyRLConfig, get_config_as_dict
from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, run_experiment, validate_cfg


class FullyAsyncPPOExp(BasePPOExp):
    """Experiment that trains asynchronously."""

    @staticmethod
    def validate(cfg: SkyRLConfig | DictConfig) -> SkyRLConfig:
        settings = get_config_as_dict(cfg)
        settings["trainer"]["fully_async"]["enabled"] = True
        return validate_cfg(SkyRLConfig.from_dict(settings))


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg, FullyAsyncPPOExp, FullyAsyncPPOExp.validate)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
