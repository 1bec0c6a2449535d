"""`python -m skyrl_train.entrypoints.main_base key=value …`: a training run from settings.

`BasePPOExp` turns settings into objects; override a `get_*` hook to put your own in. It is the only place that knows
concrete classes.
"""

import asyncio
import multiprocessing
import signal
import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import hydra
import ray
from loguru import logger
from omegaconf import DictConfig
from ray.util.placement_group import PlacementGroup
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig, config_dir, get_config_as_yaml_str, register_config_store
from skyrl_train.config.validation import validate_cfg, validate_environments
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.errors import DataError, SkyRLError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.ray_wrapped_inference_engine import EngineProcess, RayWrappedInferenceEngine
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.tracking import Tracking
from skyrl_train.workers.actor_group import actor_options
from skyrl_train.workers.placement import SHARE_OF_SHARED_GPU, make_shared_placement_group

__all__ = ["BasePPOExp", "config_dir", "create_ray_wrapped_inference_engines_from_config", "main", "validate_cfg"]

register_config_store()


class BasePPOExp:
    """One experiment: settings in, a trained policy out.

    Args:
        cfg: settings, typed or as Hydra gives them.

    Raises:
        ConfigError: they cannot work together.
    """

    def __init__(self, cfg: SkyRLConfig | DictConfig):
        self.cfg = self.validate(cfg)
        validate_environments(self.cfg)
        self.run_folder = RunFolder(self.cfg.trainer.run_dir)
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()

    @cached_property
    def colocate_pg(self) -> PlacementGroup | None:
        """`get_colocate_pg`, asked when Ray runs: settings and data are checked without it, and sooner."""
        return self.get_colocate_pg()

    @staticmethod
    def validate(cfg: SkyRLConfig | DictConfig) -> SkyRLConfig:
        """The rules these settings must obey."""
        return validate_cfg(cfg)

    @staticmethod
    def get_cfg_as_str(cfg: SkyRLConfig) -> str:
        return get_config_as_yaml_str(cfg)

    def get_tokenizer(self, padding_side: str = "left") -> PreTrainedTokenizerBase:
        tokenizer = AutoTokenizer.from_pretrained(
            self.cfg.trainer.policy.model.path,
            trust_remote_code=True,
            use_fast=not self.cfg.trainer.disable_fast_tokenizer,
            padding_side=padding_side,
        )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def get_train_dataset(self) -> PromptDataset | None:
        """The prompts of `data.train_data`. Raises DataError if they do not fill one batch."""
        dataset = PromptDataset(self.cfg.data.train_data, self.tokenizer, self.cfg.trainer.max_prompt_length)
        if len(dataset) < self.cfg.trainer.train_batch_size:
            raise DataError(
                f"data.train_data has {len(dataset)} usable prompts, fewer than trainer.train_batch_size="
                f"{self.cfg.trainer.train_batch_size}: give more prompts or a smaller batch"
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        if self.cfg.trainer.eval_interval <= 0 or not self.cfg.data.val_data:
            return None
        return PromptDataset(self.cfg.data.val_data, self.tokenizer, self.cfg.trainer.max_prompt_length)

    def get_colocate_pg(self, timeout: float | None = None) -> PlacementGroup | None:
        return make_shared_placement_group(self.cfg, timeout)

    def get_inference_client(self) -> InferenceEngineClient:
        engines = create_ray_wrapped_inference_engines_from_config(self.cfg, self.colocate_pg, self.tokenizer)
        return InferenceEngineClient(engines, self.tokenizer, self.cfg)

    def get_generator(
        self,
        cfg: SkyRLConfig,
        tokenizer: PreTrainedTokenizerBase,
        inference_engine_client: InferenceEngineInterface,
    ) -> GeneratorInterface:
        return SkyRLGymGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            model_name=cfg.trainer.policy.model.path,
        )

    def get_tracker(self) -> Tracking:
        trainer = self.cfg.trainer
        return Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.run_name,
            backends=trainer.logger,
            config=self.cfg,
            run_folder=self.run_folder,
        )

    def get_trainer(
        self,
        cfg: SkyRLConfig,
        tracker: Tracking,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: PromptDataset | None,
        eval_dataset: PromptDataset | None,
        inference_engine_client: InferenceEngineClient,
        generator: GeneratorInterface,
        colocate_pg: PlacementGroup | None,
    ) -> RayPPOTrainer:
        return RayPPOTrainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )

    def run(self) -> None:
        """Trains to the end."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        trainer = await self._setup_trainer()
        try:
            await trainer.train()
        finally:
            await trainer.shutdown()

    async def _setup_trainer(self) -> RayPPOTrainer:
        self.run_folder.write_config(self.get_cfg_as_str(self.cfg))
        tracker = self.get_tracker()
        client = self.get_inference_client()
        trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client),
            colocate_pg=self.colocate_pg,
        )
        await trainer.build_models()
        return trainer


def create_ray_wrapped_inference_engines_from_config(
    cfg: SkyRLConfig, colocate_pg: PlacementGroup | None, tokenizer: PreTrainedTokenizerBase
) -> list[RayWrappedInferenceEngine]:
    """Starts `generator.num_inference_engines` engines, each in a Ray process that logs to the run folder."""
    logs = RunFolder(cfg.trainer.run_dir).logs_folder
    device = cfg.trainer.placement.resolved_device()
    engines = []
    for index in range(cfg.generator.num_inference_engines):
        name, log_file = f"engine {index}", str(logs / f"engine_{index}.log")
        gpu_share = 1.0 if colocate_pg is None else SHARE_OF_SHARED_GPU
        options = actor_options(device, gpu_share, colocate_pg, index) | {"max_concurrency": 10_000}
        actor = ray.remote(EngineProcess).options(**options).remote(engine_factory(cfg, device), log_file)
        engines.append(RayWrappedInferenceEngine(actor, name, log_file, cfg.generator.request_timeout_seconds))
    return engines


def engine_factory(cfg: SkyRLConfig, device: str) -> partial[InferenceEngineInterface]:
    """What makes one engine, in whichever process it will live."""
    generator = cfg.generator
    return partial(
        _make_native_engine,
        model_path=generator.model_name,
        device="cuda:0" if device == "cuda" else "cpu",  # Ray shows each process one GPU
        dtype=generator.model_dtype,
        max_num_seqs=generator.max_num_seqs,
        model_config_kwargs=cfg.trainer.policy.model_config_kwargs,
        **generator.engine_init_kwargs,
    )


def _make_native_engine(**settings: Any) -> InferenceEngineInterface:
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine  # torch, in the engine's process

    return NativeInferenceEngine(**settings)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class Experiment(Protocol):
    """What `run_experiment` runs."""

    def run(self) -> None: ...


def run_experiment(cfg: SkyRLConfig, experiment: Callable[[SkyRLConfig], Experiment] = BasePPOExp) -> None:
    """Starts Ray, runs the experiment in this process, stops Ray. What a person must mend ends it with a plain text.

    SIGINT and SIGTERM end it in order: nothing of it keeps running.
    """
    configure_logging(RunFolder(cfg.trainer.run_dir).log_path("trainer"))
    try:
        prepared = experiment(cfg)  # what is wrong with settings or data is seen before Ray starts
        initialize_ray(cfg)
        signal.signal(signal.SIGTERM, _interrupt)  # Ray's own handler aborts
        prepared.run()
    except SkyRLError as error:
        logger.error(f"{type(error).__name__}: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        logger.warning("told to stop; the same command goes on from the newest checkpoint, if there is one")
        sys.exit(128 + signal.SIGINT)
    finally:
        ray.shutdown()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    try:
        typed = validate_cfg(cfg)
    except SkyRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    run_experiment(typed)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
