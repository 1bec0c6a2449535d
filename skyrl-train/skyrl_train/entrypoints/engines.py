"""Construction of rollout engines from settings: their processes and GPUs. `EngineRegistry` has the classes."""

from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import GeneratorConfig, SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.env_vars import engine_api_key
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.engine_handle import EngineHandle
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.remote.check import check_server
from skyrl_train.inference_engines.remote.key_guard import read_key_file
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.memory_plan.decisions import decide_memory_of_run
from skyrl_train.orchestration.placement import make_launcher

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def start_engines(
    cfg: SkyRLConfig,
    tokenizer: PreTrainedTokenizerBase,
    colocate_pg: "PlacementGroup | None" = None,
    *,
    weights_follow: bool = False,
) -> InferenceEngineClient:
    """Build a client over the engines of `generator.*`: started here, or external servers.

    Args:
        colocate_pg: the GPUs that engines share with workers.
        weights_follow: engines start with random weights, since a first sync sends all of them (and thereby is
            verified).
    """
    if not cfg.generator.run_engines_locally:
        return InferenceEngineClient(build_remote_engines(cfg, tokenizer), tokenizer, cfg)
    limited = decide_memory_of_run(cfg).apply(cfg) if weights_follow else cfg
    starter = EngineStarter(limited, colocate_pg, weights_follow=weights_follow)
    engines = [starter.start(index) for index in range(cfg.generator.num_inference_engines)]

    async def restart(index: int) -> InferenceEngineInterface:
        return starter.start(index)

    return InferenceEngineClient(engines, tokenizer, cfg, restart=restart)


def create_ray_wrapped_inference_engines_from_config(
    cfg: SkyRLConfig, colocate_pg: "PlacementGroup | None", tokenizer: PreTrainedTokenizerBase
) -> list[EngineHandle]:
    """Start `generator.num_inference_engines` engines with the model's weights, without restarts after failures."""
    starter = EngineStarter(cfg, colocate_pg, weights_follow=False)
    return [starter.start(index) for index in range(cfg.generator.num_inference_engines)]


def check_engines(cfg: SkyRLConfig) -> None:
    """Check everything about the engines that can be known before start: keywords, and support of the model.

    Raises:
        ConfigError: an unknown keyword, or a model that cannot be sharded as configured.
    """
    generator = cfg.generator
    if not generator.run_engines_locally:
        return
    EngineRegistry.get_requirements(generator.backend).check_model(generator)


class EngineStarter:
    """Starter of the configured engines, and of replacements for crashed ones."""

    def __init__(self, cfg: SkyRLConfig, colocate_pg: "PlacementGroup | None", *, weights_follow: bool):
        self._launcher = make_launcher(cfg, colocate_pg)
        self._factory = build_engine_factory(cfg, cfg.trainer.placement.resolve_device(), weights_follow=weights_follow)

    def start(self, index: int) -> EngineHandle:
        """Start engine `index`. Returns at once; calls wait until it is ready."""
        return self._launcher.start_engine(index, self._factory)


def build_engine_factory(
    cfg: SkyRLConfig, device: str, *, weights_follow: bool = False
) -> partial[InferenceEngineInterface]:
    """Return a function that builds an engine in any process."""
    generator = cfg.generator
    adapters_alone = generator.weight_sync_strategy == "adapter"
    settings: dict[str, Any] = dict(
        model_path=generator.model_name,
        device="cuda:0" if device == "cuda" else "cpu",  # Ray shows each process only its GPUs
        dtype=generator.model_dtype,
        max_num_seqs=generator.max_num_seqs,
        dummy_weights=weights_follow and not adapters_alone,
        model_config_kwargs=cfg.trainer.policy.model_config_kwargs,
        seed=generator.seed,
    )
    if adapters_alone:
        settings["max_lora_rank"] = cfg.trainer.policy.model.lora.rank
    traits = EngineRegistry.get_requirements(generator.backend)
    settings |= traits.keywords(cfg, device)
    if cfg.trainer.policy.routing_replay == "R3" and traits.expert_routes:
        settings["return_expert_routes"] = True
    return partial(EngineRegistry.get(generator.backend), **(settings | generator.engine_init_kwargs))


def build_remote_engine(
    generator: GeneratorConfig, url: str, tokenizer: PreTrainedTokenizerBase, backend: str | None = None
) -> RemoteInferenceEngine:
    """Connect to an external server and check it.

    Args:
        backend: the kind of server (`vllm`, `sglang`); None or `auto`: asks the server.

    Raises:
        ConfigError: it does not match the settings.
        WorkerError: it cannot be reached, or does not respond.
    """
    engine = RemoteInferenceEngine(
        url,
        generator.model_name,
        backend=None if backend == "auto" else backend,
        tokenizer=tokenizer,
        request_timeout_seconds=generator.request_timeout_seconds,
        control_timeout_seconds=generator.engine_control_timeout_seconds,
        api_key=read_remote_api_key(generator),
    )
    check_server(engine, tokenizer)
    return engine


def read_remote_api_key(generator: GeneratorConfig) -> SecretStr | None:
    """Return the key of external servers, from the configured file or the environment."""
    file = generator.remote_inference_engine_api_key_file
    setting = "generator.remote_inference_engine_api_key_file"
    key = engine_api_key() if file is None else read_key_file(file, setting)
    return None if key is None else SecretStr(key)


def build_remote_engines(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase) -> list[InferenceEngineInterface]:
    """Connect to the servers of `generator.remote_inference_engine_urls`. Raises ConfigError if one does not match."""
    engines: list[InferenceEngineInterface] = []
    for url in cfg.generator.remote_inference_engine_urls:
        try:
            engines.append(build_remote_engine(cfg.generator, url, tokenizer, cfg.generator.backend))
        except WorkerError as error:
            raise ConfigError(
                f"generator.remote_inference_engine_urls: {error}\nStart the server (see docs/engines.md), or correct "
                "its address"
            ) from error
    return engines
