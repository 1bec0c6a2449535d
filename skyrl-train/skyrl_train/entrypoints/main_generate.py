"""Evaluation of a model without training: `python -m skyrl_train.entrypoints.main_generate key=value …`."""

import asyncio

import hydra
from loguru import logger
from omegaconf import DictConfig

from skyrl_train.config import SkyRLConfig, config_dir
from skyrl_train.config.validation import validate_generator_cfg
from skyrl_train.dataset.dataloader import PromptDataLoader
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.entrypoints.engines import start_engines
from skyrl_train.entrypoints.main_base import BasePPOExp, run_experiment
from skyrl_train.errors import ConfigError
from skyrl_train.evaluate import evaluate
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.utils.run_owner import acquire_run


class EvalOnlyEntrypoint(BasePPOExp):
    """Experiment with engines, a generator and the evaluation set."""

    sampling_sections = ("eval_sampling_params",)

    @staticmethod
    def validate(cfg: SkyRLConfig | DictConfig) -> SkyRLConfig:
        return validate_generator_cfg(cfg)

    def get_train_dataset(self) -> None:
        return None

    def get_eval_dataset(self) -> PromptDataset:
        """Return the prompts of `data.val_data`, for any `eval_interval`."""
        if not self.cfg.data.val_data:
            raise ConfigError("data.val_data is empty; set it to the datasets to evaluate on")
        return self.read_prompts(self.cfg.data.val_data)

    def get_inference_client(self) -> InferenceEngineClient:
        """Return the engines, with the model's weights."""
        return start_engines(self.cfg, self.tokenizer, self.colocate_pg)

    def run(self) -> None:
        """Evaluate and log the metrics."""
        with acquire_run(self.cfg.trainer.run_dir):
            asyncio.run(self.evaluate())

    async def evaluate(self) -> dict[str, float | None]:
        """Evaluate the evaluation set. Returns: the metrics by name."""
        self.run_folder.write_config(self.get_cfg_as_str(self.cfg))
        tracker = self.get_tracker()
        client = self.get_inference_client()
        await client.wake_up()
        dataset = self.eval_dataset
        assert dataset is not None, "get_eval_dataset of this class always returns one"
        dataloader = PromptDataLoader(
            dataset,
            self.cfg.trainer.eval_batch_size,
            shuffle=False,
            drop_last=False,
            seed=self.cfg.trainer.seed,
        )
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        try:
            metrics = await evaluate(dataloader, generator, self.cfg, None, self.tokenizer, tracker)
        finally:
            await client.teardown()
        tracker.log(metrics, step=0, commit=True)
        tracker.finish()
        for name in sorted(metrics):
            if name.startswith("eval/") and not name.startswith("eval/all/generate"):
                value = metrics[name]
                logger.info(f"{name} {'none: every rollout failed' if value is None else format(value, '.4f')}")
        logger.info(
            f"this run is finished: it was one evaluation; python -m skyrl_train.dashboard {self.run_folder.path}"
        )
        return metrics


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg, EvalOnlyEntrypoint, validate_generator_cfg)


if __name__ == "__main__":
    main()
