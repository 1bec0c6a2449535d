"""On-policy distillation from settings: `python -m skyrl_train.entrypoints.main_distill key=value …`.

A reinforcement-learning run (`main_base`) whose tokens are scored by teachers (`trainer.distillation`); by default
without environment rewards, without a reference model, and with one response per prompt.
"""

import multiprocessing
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import hydra
from loguru import logger
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import GeneratorConfig, SkyRLConfig, config_dir, register_config_store
from skyrl_train.config.distillation import TeacherConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.distillation_trainer import (
    AsyncDistillationTrainer,
    DistillationTrainer,
    teacher_folder,
    teacher_of_source,
)
from skyrl_train.entrypoints.engines import build_remote_engines, start_engines
from skyrl_train.entrypoints.main_base import BasePPOExp, run_experiment
from skyrl_train.entrypoints.model_files import load_tokenizer, model_config
from skyrl_train.errors import ConfigError
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils.run_folder import RunFolder

NAME = "trainer.distillation"
DEFAULTS = {
    "trainer.algorithm.advantage_estimator": "token_reward",
    "trainer.algorithm.policy_loss_type": "importance_sampling",
    "trainer.algorithm.use_kl_loss": False,
    "generator.n_samples_per_prompt": 1,
}
"""Defaults of this entry point that differ from the defaults of the settings."""

_SHOWN = 3
_BYTES_A_WORD = 8  # an int32 id and a float32 log-prob

register_config_store(name="distill_base_config", changes=DEFAULTS)


class DistillationExp(BasePPOExp):
    """Experiment of on-policy distillation.

    Raises:
        ConfigError: as for `BasePPOExp`, and for teachers that cannot be loaded, have another vocabulary, do not
            respond, or leave a row without a teacher.
    """

    has_teachers = True

    def __init__(self, cfg: SkyRLConfig | DictConfig):
        super().__init__(cfg)
        settings = self.cfg.trainer.distillation
        if not settings.is_on:
            raise ConfigError(
                f"{NAME}.teachers is empty; set a teacher, such as {NAME}.teachers.main.model=FOLDER_OR_HUB_NAME"
            )
        student = model_config(self.cfg.trainer.policy.model.path, "trainer.policy.model.path")
        self.vocab_sizes: list[int] = [student.get_text_config().vocab_size]
        for name, teacher in settings.teachers.items():
            self.vocab_sizes.append(self._check_teacher(f"{NAME}.teachers.{name}", name, teacher))
        self.num_top = self._compute_num_top()
        if isinstance(self.train_dataset, PromptDataset):
            for source in self.train_dataset.find_distinct_values("data_source"):
                teacher_of_source(settings, source)

    def _check_teacher(self, setting: str, name: str, teacher: TeacherConfig) -> int:
        """Check a teacher's model, vocabulary and servers. Returns: the size of its vocabulary."""
        if teacher.urls:
            self._start_named(setting, lambda: build_remote_engines(self._build_engine_settings(name), self.tokenizer))
        try:
            config = model_config(teacher.model, f"{setting}.model")
            tokenizer = load_tokenizer(teacher.model, f"{setting}.model")
        except ConfigError as error:
            if not teacher.urls:
                raise
            # The server's tokenizer was compared with the student's on texts; only sizes are unknown.
            logger.info("{} is available only at its server, not locally: {}", setting, error)
            return self.vocab_sizes[0]
        if not (teacher.engines or teacher.urls):
            check = TrainingBackendRegistry.get_requirements(self.cfg.trainer.strategy).check_model_config
            check(config, self.cfg.trainer.ref, setting)
        check_same_vocabulary(self.tokenizer, tokenizer, setting, teacher.model)
        return config.get_text_config().vocab_size

    def _compute_num_top(self) -> int:
        """Return the number of candidates compared at each position. Raises ConfigError if it exceeds the vocabulary,
        or if their log-probs may need more memory than allowed."""
        settings, generator = self.cfg.trainer.distillation, self.cfg.generator
        if settings.tokens == "sampled":
            return 0
        most = min(self.vocab_sizes)
        if settings.tokens == "top_k" and settings.top_k >= most:
            raise ConfigError(
                f"{NAME}.top_k={settings.top_k} must be below the {most} tokens of the smallest vocabulary (teachers "
                f"and student); lower it, or use {NAME}.tokens=full"
            )
        num_top = settings.top_k if settings.tokens == "top_k" else most
        rows = self.cfg.trainer.train_batch_size * generator.n_samples_per_prompt
        length = generator.sampling_params.max_generate_length * max(1, generator.max_turns)
        needed = rows * min(length, generator.longest_context) * num_top * _BYTES_A_WORD / 1e9
        if needed > settings.memory_gb:
            raise ConfigError(
                f"{NAME}.tokens={settings.tokens}: the teachers' log-probs of a batch may take {needed:.1f} GB ({rows} "
                f"responses of up to {min(length, generator.longest_context)} tokens, {num_top} tokens of "
                f"{_BYTES_A_WORD} bytes each), more than {NAME}.memory_gb={settings.memory_gb:g}; use tokens=top_k or "
                "a smaller top_k, a smaller trainer.train_batch_size, or raise memory_gb"
            )
        return num_top

    def get_trainer(self, cfg: SkyRLConfig, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        kind = AsyncDistillationTrainer if cfg.trainer.fully_async.enabled else DistillationTrainer
        trainer: DistillationTrainer = kind(cfg, *args, **kwargs)
        trainer.vocab_size, trainer.num_top = self.vocab_sizes[0], self.num_top
        trainer.teacher_clients = {
            name: self._start_named(
                f"{NAME}.teachers.{name}",
                lambda name=name: start_engines(self._build_engine_settings(name), self.tokenizer),
            )
            for name, teacher in cfg.trainer.distillation.teachers.items()
            if teacher.engines or teacher.urls
        }
        return trainer

    def _build_engine_settings(self, name: str) -> SkyRLConfig:
        """Return the settings of a teacher's engines: the run's settings with its model and without weight sync."""
        cfg, teacher = deepcopy(self.cfg), self.cfg.trainer.distillation.teachers[name]
        generator, trainer, defaults = cfg.generator, cfg.trainer, GeneratorConfig()
        trainer.run_dir = str(teacher_folder(RunFolder(trainer.run_dir), name).path)
        trainer.policy.model.path = generator.model_name = teacher.model
        trainer.policy.model_config_kwargs, trainer.policy.routing_replay = {}, "off"
        trainer.placement.colocate_all = False
        generator.weight_sync_strategy = defaults.weight_sync_strategy
        generator.num_inference_engines = teacher.engines or len(teacher.urls)
        if teacher.urls:
            generator.run_engines_locally, generator.backend = False, "auto"  # the server reports its kind
        generator.remote_inference_engine_urls = list(teacher.urls)
        return cfg

    def _start_named(self, setting: str, start: Any) -> Any:
        """Call `start`; errors about engine settings name the teacher's settings instead."""
        try:
            return start()
        except ConfigError as error:
            text = str(error).replace("generator.remote_inference_engine_urls", f"{setting}.urls")
            raise ConfigError(text.replace("generator.model_name", f"{setting}.model")) from error


def check_same_vocabulary(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, setting: str, path: str
) -> None:
    """Check that every token, including special tokens, has the same id for both: a teacher scores ids.

    Raises:
        ConfigError: they differ.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    special = [token for token in student.all_special_tokens if theirs.get(token) != ours.get(token)]
    differing = [*special, *sorted(token for token in ours | theirs if ours.get(token) != theirs.get(token))]
    shown = "; ".join(
        f"{token!r}: {_describe_id(ours, token)} and {_describe_id(theirs, token)}"
        for token in _describe_first(differing)
    )
    raise ConfigError(
        f"{setting}.model={path} and the student (trainer.policy.model.path) have different vocabularies: "
        f"{len(theirs)} and {len(ours)} tokens, of which {len(set(differing))} have different ids (student and "
        f"teacher): {shown}. Distillation compares probabilities by token id; use a teacher of the student's model "
        "family"
    )


def _describe_first(tokens: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(tokens))[:_SHOWN]


def _describe_id(vocabulary: dict[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "missing"


@hydra.main(config_path=config_dir, config_name="distill_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg, DistillationExp)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
