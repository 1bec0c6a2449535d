"""Training run from settings: `python -m skyrl_train.entrypoints.main_base key=value …`.

`BasePPOExp` builds objects from settings; override a `get_*` hook to customize one. It is the only module that knows
concrete classes.
"""

import asyncio
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import hydra
from loguru import logger
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from skyrl_gym.waits import end_run
from skyrl_train.config import SkyRLConfig, config_dir, get_config_as_yaml_str, register_config_store
from skyrl_train.config.config import EnvironmentConfig
from skyrl_train.config.validation import validate_cfg, validate_environments
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.endpoint.server import check_address
from skyrl_train.entrypoints.agent import build_agent_generator, check_agent
from skyrl_train.entrypoints.endpoint import build_endpoint, listening
from skyrl_train.entrypoints.engines import (
    check_engines,
    create_ray_wrapped_inference_engines_from_config,
    start_engines,
)
from skyrl_train.entrypoints.model_files import SAMPLING, check_models, load_tokenizer
from skyrl_train.errors import ConfigError, DataError, SkyRLError
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.orchestration.placement import make_shared_placement_group
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_run import check_before_start, says_finished
from skyrl_train.utils import initialize_ray, shutdown_ray
from skyrl_train.utils.chat_templates import get_configured_chat_template
from skyrl_train.utils.explanations import start_recording_waits
from skyrl_train.utils.io import is_full_disk
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.progress import progress
from skyrl_train.utils.run_folder import RunFolder, link_logs
from skyrl_train.utils.run_owner import acquire_run
from skyrl_train.utils.tracebacks import described, log_traceback
from skyrl_train.utils.tracking import Tracking

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = ["BasePPOExp", "config_dir", "create_ray_wrapped_inference_engines_from_config", "main", "validate_cfg"]

register_config_store()


class BasePPOExp:
    """Experiment that builds the objects of a run from its settings, and trains.

    Args:
        cfg: settings, typed or from Hydra.

    Raises:
        ConfigError: invalid settings, or settings that do not match the checkpoint to resume.
    """

    sampling_sections: ClassVar[Sequence[str]] = SAMPLING
    """Sections of `generator` with its sampling parameters."""

    has_teachers: ClassVar[bool] = False
    """Whether it reads `trainer.distillation`."""

    def __init__(self, cfg: SkyRLConfig | DictConfig):
        self.cfg = self.validate(cfg)
        if self.cfg.trainer.distillation.is_on and not self.has_teachers:
            raise ConfigError(
                "trainer.distillation.teachers has no effect in this entry point; use python -m "
                "skyrl_train.entrypoints.main_distill, which has the same settings, or remove it"
            )
        validate_environments(self.cfg)
        check_models(self.cfg, self.sampling_sections)
        check_engines(self.cfg)
        if self.cfg.generator.enable_http_endpoint:
            check_address(self.cfg.generator.http_endpoint_host, self.cfg.generator.http_endpoint_port)
        self.run_folder = RunFolder(self.cfg.trainer.run_dir)
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()
        if not self.cfg.generator.uses_environments:
            datasets = {"data.train_data": self.train_dataset, "data.val_data": self.eval_dataset}
            rows = {setting: dataset.rows for setting, dataset in datasets.items() if dataset is not None}
            check_agent(self.cfg.generator, self.tokenizer, rows)
        check_before_start(self.cfg, self.train_dataset)
        warn_of_unused_environment(self.cfg, self.train_dataset)

    @cached_property
    def colocate_pg(self) -> "PlacementGroup | None":
        """`get_colocate_pg`, called once Ray is running: settings and data are checked earlier, without it."""
        return self.get_colocate_pg()

    @staticmethod
    def validate(cfg: SkyRLConfig | DictConfig) -> SkyRLConfig:
        """Return the checked settings."""
        return validate_cfg(cfg)

    @staticmethod
    def get_cfg_as_str(cfg: SkyRLConfig) -> str:
        return get_config_as_yaml_str(cfg)

    def get_tokenizer(self, padding_side: str = "left") -> PreTrainedTokenizerBase:
        return load_tokenizer(
            self.cfg.trainer.policy.model.path,
            use_fast=not self.cfg.trainer.disable_fast_tokenizer,
            padding_side=padding_side,
        )

    def get_train_dataset(self) -> PromptDataset | None:
        """Return the prompts of `data.train_data`. Raises DataError if they do not fill one batch."""
        dataset = self.read_prompts(self.cfg.data.train_data)
        if len(dataset) < self.cfg.trainer.train_batch_size:
            raise DataError(
                f"data.train_data has {len(dataset)} usable prompts, fewer than "
                f"trainer.train_batch_size={self.cfg.trainer.train_batch_size}: add prompts or lower the batch size"
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        if self.cfg.trainer.eval_interval <= 0 or not self.cfg.data.val_data:
            return None
        return self.read_prompts(self.cfg.data.val_data)

    def read_prompts(self, sources: list[str]) -> PromptDataset:
        """Read prompts, dropping those over `trainer.max_prompt_length` under the template used for generation."""
        return PromptDataset(
            sources,
            self.tokenizer,
            self.cfg.trainer.max_prompt_length,
            chat_template=get_configured_chat_template(self.tokenizer, self.cfg.generator),
            cache_dir=self.cfg.data.cache_dir,
        )

    def get_colocate_pg(self, timeout: float | None = None) -> "PlacementGroup | None":
        return make_shared_placement_group(self.cfg, timeout)

    def get_inference_client(self) -> InferenceEngineClient:
        """Return the engines, which wait for the policy's weights."""
        return start_engines(self.cfg, self.tokenizer, self.colocate_pg, weights_follow=True)

    def get_generator(
        self,
        cfg: SkyRLConfig,
        tokenizer: PreTrainedTokenizerBase,
        inference_engine_client: InferenceEngineInterface,
    ) -> GeneratorInterface:
        if not cfg.generator.uses_environments:
            return build_agent_generator(cfg.generator, tokenizer, inference_engine_client)
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
            tags=trainer.tags,
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
        colocate_pg: "PlacementGroup | None",
    ) -> RayPPOTrainer:
        trainer = FullyAsyncRayPPOTrainer if cfg.trainer.fully_async.enabled else RayPPOTrainer
        return trainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )

    def get_endpoint(self, client: InferenceEngineClient) -> AbstractAsyncContextManager[object]:
        """Build the server that gives external clients access to the engines during the run
        (`generator.enable_http_endpoint`)."""
        if not self.cfg.generator.enable_http_endpoint:
            return nullcontext()
        return listening(build_endpoint(self.cfg, client, self.tokenizer))

    def is_finished(self) -> bool:
        """Return whether a checkpoint of the last step exists, and log it. False for a run without training data."""
        return self.train_dataset is not None and says_finished(self.cfg, len(self.train_dataset))

    def run(self) -> None:
        """Train to the end."""
        with acquire_run(self.cfg.trainer.run_dir, self.cfg.trainer.ckpt_path):
            asyncio.run(self._run())

    async def _run(self) -> None:
        trainer = await self._setup_trainer()
        try:
            async with self.get_endpoint(trainer.inference_engine_client):
                with trainer.reporting_errors():
                    await trainer.train()
        finally:
            await trainer.shutdown()

    async def _setup_trainer(self) -> RayPPOTrainer:
        self.run_folder.write_config(self.get_cfg_as_str(self.cfg))
        tracker = self.get_tracker()
        with progress.phase("start the engines"):
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
        with trainer.reporting_errors():
            await trainer.build_models()
        return trainer


def warn_of_unused_environment(cfg: SkyRLConfig, dataset: PromptDataset | None) -> None:
    """Warn if `environment.env_class` is set but overridden by environments in all rows of the training data."""
    chosen = cfg.environment.env_class
    if dataset is None or not cfg.generator.uses_environments or chosen in (None, EnvironmentConfig().env_class):
        return
    others = sorted({str(name) for name in dataset.find_distinct_values(dataset.env_class_key) if name} - {chosen})
    if others:
        logger.warning(
            f"environment.env_class={chosen} is not used for rows whose env_class is {', '.join(others)}: the row's "
            "value takes precedence. Remove the column to use the setting for all rows"
        )


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class Experiment(Protocol):
    """Interface of an experiment, for `run_experiment`."""

    def is_finished(self) -> bool: ...
    def run(self) -> None: ...


@contextmanager
def _acquire_run(cfg: SkyRLConfig) -> Iterator[Path]:
    """Acquire the folder of the run during the context, and log to it. Yields the path of the log."""
    trainer, run_folder = cfg.trainer, RunFolder(cfg.trainer.run_dir)
    path = run_folder.log_path("trainer")
    with ExitStack() as stack:
        try:
            stack.enter_context(acquire_run(trainer.run_dir, trainer.ckpt_path))
            if trainer.log_folder is not None:
                link_logs(run_folder, trainer.log_folder)
            configure_logging(path)
        except OSError as error:
            raise ConfigError(
                f"trainer.run_dir={path.parents[1]} or trainer.log_path={trainer.log_path} cannot be written: "
                f"{error}; use a writable folder with free space"
            ) from error
        yield path


def run_experiment(
    cfg: SkyRLConfig | DictConfig,
    experiment: Callable[[SkyRLConfig], Experiment] = BasePPOExp,
    validate: Callable[[SkyRLConfig | DictConfig], SkyRLConfig] = validate_cfg,
) -> None:
    """Check the settings, start Ray (unless `trainer.placement.launcher=inline`), run the experiment, stop Ray.

    Args:
        cfg: typed, or from Hydra.
        experiment: builds the experiment from typed settings.
        validate: types and checks settings that come from Hydra.

    Failures end the process with exit code 1 and a plain text: for a framework error its message, for any other
    exception (such as from user code) its message and the user's frames. The full traceback is in
    `<run>/logs/trainer.log`. SIGINT and SIGTERM shut down everything in order. After SIGTERM training first saves a
    checkpoint (`trainer.stop_timeout_seconds`).
    """
    log_path: Path | None = None
    owned = ExitStack()  # until everything has ended
    try:
        configure_logging()
        typed = cfg if isinstance(cfg, SkyRLConfig) else validate(cfg)
        log_path = owned.enter_context(_acquire_run(typed))
        start_recording_waits(log_path.parents[1])
        with progress.showing(typed.trainer.show_progress):
            prepared = experiment(typed)  # errors in settings or data are found before Ray starts
            if prepared.is_finished():
                return
            initialize_ray(typed)
            signal.signal(signal.SIGTERM, _interrupt)  # Ray's handler aborts
            prepared.run()
    except SkyRLError as error:
        if log_path is not None and log_path.exists():
            log_traceback(error)
        notes: list[str] = getattr(error, "__notes__", [])
        logger.error("{}", "\n".join([f"{type(error).__name__}: {error}", *notes]))
        sys.exit(1)
    except KeyboardInterrupt:
        logger.warning("stop requested; the same command resumes from the newest checkpoint, if any")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # user code may raise anything
        log_traceback(error)
        remedy = "\nfree disk space and run the same command again: it resumes exactly" if is_full_disk(error) else ""
        logger.error("{}{}\nfull traceback: {}", described(error), remedy, log_path)
        sys.exit(1)
    finally:
        shutdown_ray()
        end_run()
        owned.close()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
