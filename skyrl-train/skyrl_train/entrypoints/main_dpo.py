"""Training on preference pairs (DPO): `python -m skyrl_train.entrypoints.main_dpo key=value …`."""

import hydra
from omegaconf import DictConfig

from skyrl_train.config import config_dir, register_config_store
from skyrl_train.config.supervised import PreferenceConfig
from skyrl_train.entrypoints.main_sft import start

register_config_store(PreferenceConfig, "dpo_base_config")


@hydra.main(config_path=config_dir, config_name="dpo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    start(cfg, PreferenceConfig)


if __name__ == "__main__":
    main()
