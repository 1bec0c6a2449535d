"""The backend `skyrl_train` from its settings: Ray, the engines, training."""

import os
from pathlib import Path

import msgspec
import ray
from transformers import AutoTokenizer

from skyrl_gym.chat.tokenizer_check import find_tokenizer_fault
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.entrypoints.engines import check_engines, start_engines
from skyrl_train.orchestration.ray_launcher import RayRanks
from skyrl_train.utils.ray_cluster import start_ray
from skyrl_train.utils.run_folder import RunFolder
from tx.errors import ConfigError, ModelError
from tx.tinker.backends.base import Backend, BackendInfo
from tx.tinker.backends.skyrl_train.sampling import EngineSampling
from tx.tinker.backends.skyrl_train.settings import SkyRLTrainSettings
from tx.tinker.backends.torch.group import GroupTraining, TrainingRanks
from tx.tinker.backends.torch.training_rank import TrainingRank
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.config import EngineConfig
from tx.tinker.types import LoraSpec


def build(config: EngineConfig, facts: BaseModelFacts) -> Backend:
    """Start all processes and wait for those that train; `start()` of the sampling waits for the engines.

    Raises:
        ConfigError: (ours or skyrl_train's) a setting is unknown or impossible, or there are too few GPUs.
    """
    settings = SkyRLTrainSettings.from_dict(config.backend_config)
    engines = settings.engine_config(facts.folder, config.state_folder / "skyrl_train", facts.max_context)
    if settings.ray_address:
        os.environ["RAY_ADDRESS"] = settings.ray_address
    start_ray(engines)
    _check_gpus(engines)
    sampling = _build_sampling(settings, engines, facts.vocab_size)  # the engines start meanwhile
    return Backend(training=_build_training(settings, engines, facts.folder), sampling=sampling)


def _build_sampling(settings: SkyRLTrainSettings, engines: SkyRLConfig, vocab_size: int) -> "SamplingWithRay":
    check_engines(engines)
    trust = bool(settings.training.get("trust_remote_code", False))
    path = engines.trainer.policy.model.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    if fault := find_tokenizer_fault(tokenizer, vocab_size):
        raise ConfigError(f"base_model={path}: {fault}")
    client = start_engines(engines, tokenizer)
    return SamplingWithRay(
        client,
        max_num_seqs=engines.generator.max_num_seqs * len(client.engines),
        max_loaded_adapters=settings.max_loaded_adapters,
        takes_head=_has_head_adapters(engines),
    )


def _build_training(settings: SkyRLTrainSettings, engines: SkyRLConfig, base_model: Path) -> "AdaptersForEngines":
    placement = engines.trainer.placement
    device, seconds = placement.device, settings.process_timeout_seconds
    options = {"dtype": settings.resolved_dtype(device), "max_lora_rank": settings.max_lora_rank, **settings.training}
    workers = RayRanks(
        "training",
        TrainingRank,
        (str(base_model), options, seconds),
        num_ranks=settings.num_processes,
        device=device,
        log_folder=RunFolder(engines.trainer.run_dir).logs_folder,
    )
    ranks = TrainingRanks(workers, device=device, timeout_seconds=seconds)
    frozen_head = settings.freeze_unembed and not _has_head_adapters(engines)
    return AdaptersForEngines(ranks, takes_head=_has_head_adapters(engines), frozen_head=frozen_head)


def _has_head_adapters(engines: SkyRLConfig) -> bool:
    """Return True if the engines compute adapters of the output layer."""
    return EngineRegistry.get_requirements(engines.generator.backend).output_layer_adapters


class SamplingWithRay(EngineSampling):
    """Ray ends with it."""

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            ray.shutdown()


class AdaptersForEngines(GroupTraining):
    """Trains only what the engines compute.

    Args:
        takes_head: they compute adapters of the output layer
        frozen_head: where they do not, requests for such adapters are taken all the same, and that layer left alone
    """

    def __init__(self, ranks: TrainingRanks, *, takes_head: bool, frozen_head: bool):
        super().__init__(ranks)
        self._takes_head, self._frozen_head = takes_head, frozen_head

    def info(self) -> BackendInfo:
        can_train_unembed = self._takes_head or self._frozen_head
        return msgspec.structs.replace(super().info(), name="skyrl_train", can_train_unembed=can_train_unembed)

    def create(self, model_id: str, lora: LoraSpec) -> None:
        super().create(model_id, self._trained(lora))

    def restore(self, model_id: str, lora: LoraSpec, folder: Path) -> None:
        super().restore(model_id, self._trained(lora), folder)

    def _trained(self, lora: LoraSpec) -> LoraSpec:
        if lora.train_unembed and not (self._takes_head or self._frozen_head):  # taken before the server knew of it
            raise ModelError(
                "lora_config.train_unembed must be false: the engines do not support adapters of the output layer"
            )
        return msgspec.structs.replace(lora, train_unembed=False) if self._frozen_head else lora


def _check_gpus(config: SkyRLConfig) -> None:
    """
    Raises:
        ConfigError: Ray has fewer GPUs than required; engines would never start.
    """
    placement, generator = config.trainer.placement, config.generator
    num_engines = generator.num_inference_engines if generator.run_engines_locally else 0
    needed = placement.policy_world_size + num_engines * generator.engine_world_size
    there = int(ray.cluster_resources().get("GPU", 0))
    if placement.device == "cuda" and needed > there:
        raise ConfigError(
            f"backend_config.num_processes={placement.policy_world_size} and {num_engines} engines "
            f"(generator.num_inference_engines) of {generator.engine_world_size} GPUs "
            f"(generator.inference_engine_tensor_parallel_size) need {needed} GPUs; Ray has {there}"
        )
