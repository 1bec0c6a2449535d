"""Training on demonstrations: `python -m skyrl_train.entrypoints.main_sft key=value …`."""

import asyncio
import sys

import hydra
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import config_dir, get_config_as_yaml_str, register_config_store
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.dataset.supervised import SupervisedDataset
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.entrypoints.model_files import load_tokenizer
from skyrl_train.errors import SkyRLError
from skyrl_train.supervised import SupervisedTrainer
from skyrl_train.training_run import check_before_start, says_finished
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.run_owner import acquire_run
from skyrl_train.utils.tracking import Tracking

register_config_store(SupervisedConfig, "sft_base_config")


class SupervisedExp:
    """Experiment of supervised training: builds the objects of a run from its settings, and trains.

    Args:
        settings: validated; `PreferenceConfig` for preference pairs.

    Raises:
        DataError: data that cannot be read, or without trained tokens.
        ConfigError: the checkpoint to resume is of another experiment.
    """

    def __init__(self, settings: SupervisedConfig):
        self.settings = settings
        self.cfg = settings.to_training_config()
        self.run_folder = RunFolder(self.cfg.trainer.run_dir)
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_dataset(settings.data.train_data)
        check_before_start(self.cfg, self.train_dataset)
        wants_eval = self.cfg.trainer.eval_interval > 0 and settings.data.val_data
        self.eval_dataset = self.get_dataset(settings.data.val_data) if wants_eval else None

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.cfg.trainer.policy.model.path)

    def get_dataset(self, sources: list[str]) -> SupervisedDataset:
        with_pairs = isinstance(self.settings, PreferenceConfig)
        return SupervisedDataset(sources, self.tokenizer, self.settings.data, with_pairs=with_pairs)

    def is_finished(self) -> bool:
        """Return whether a checkpoint of the last step exists, and log it."""
        return says_finished(self.cfg, len(self.train_dataset))

    def run(self) -> None:
        """Train to the end."""
        with acquire_run(self.cfg.trainer.run_dir, self.cfg.trainer.ckpt_path):
            asyncio.run(self._run())

    async def _run(self) -> None:
        trainer = self.cfg.trainer
        self.run_folder.write_config(get_config_as_yaml_str(self.settings))
        tracker = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.run_name,
            backends=trainer.logger,
            config=self.settings,
            run_folder=self.run_folder,
            tags=trainer.tags,
        )
        run = SupervisedTrainer(self.cfg, tracker, self.tokenizer, self.train_dataset, self.eval_dataset)
        with run.reporting_errors():
            await run.build_models()
        try:
            with run.reporting_errors():
                await run.train()
        finally:
            await run.shutdown()


def start(cfg: DictConfig, config_type: type[SupervisedConfig]) -> None:
    """Check the settings and run them; an error that the user can correct ends it with a plain text."""
    try:
        settings = validate_supervised_cfg(cfg, config_type)
    except SkyRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    run_experiment(settings.to_training_config(), lambda _: SupervisedExp(settings))


@hydra.main(config_path=config_dir, config_name="sft_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    start(cfg, SupervisedConfig)


if __name__ == "__main__":
    main()
