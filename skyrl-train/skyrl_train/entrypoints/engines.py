"""Settings to rollout engines: which class, in which process, on which GPUs. No other place knows concrete ones."""

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from transformers import AutoConfig, PreTrainedTokenizerBase

from skyrl_train.config import GeneratorConfig, SkyRLConfig
from skyrl_train.config.typed import nearest_name
from skyrl_train.env_vars import engine_api_key
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.engine_handle import EngineHandle
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.architecture import check_architecture
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.remote.engine import RemoteInferenceEngine, check_server
from skyrl_train.inference_engines.remote.key_guard import key_from_file
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
    """A client over the engines of `generator.*`: started here, or servers started elsewhere.

    Args:
        colocate_pg: the GPUs that engines share with workers.
        weights_follow: engines start with random weights, since a first sync brings all of them (and is so proven to).
    """
    if not cfg.generator.run_engines_locally:
        return InferenceEngineClient(_remote_engines(cfg, tokenizer), tokenizer, cfg)
    starter = EngineStarter(cfg, colocate_pg, weights_follow=weights_follow)
    engines = [starter.start(index) for index in range(cfg.generator.num_inference_engines)]

    async def restart(index: int) -> InferenceEngineInterface:
        return starter.start(index)

    return InferenceEngineClient(engines, tokenizer, cfg, restart=restart)


def create_ray_wrapped_inference_engines_from_config(
    cfg: SkyRLConfig, colocate_pg: "PlacementGroup | None", tokenizer: PreTrainedTokenizerBase
) -> list[EngineHandle]:
    """`generator.num_inference_engines` engines with the model's own weights, and nobody who starts them again."""
    starter = EngineStarter(cfg, colocate_pg, weights_follow=False)
    return [starter.start(index) for index in range(cfg.generator.num_inference_engines)]


def check_engines(cfg: SkyRLConfig) -> None:
    """What can be known of the engines before anything starts: further keywords of our own, how the model divides.

    Raises:
        ConfigError: an unknown keyword, or a model that cannot be divided so.
    """
    generator = cfg.generator
    if not generator.run_engines_locally:
        return
    if generator.backend == "native":
        known = list(inspect.signature(NativeInferenceEngine).parameters)
        for name in generator.engine_init_kwargs:
            if name not in known:
                nearest = nearest_name(name, known)
                raise ConfigError(
                    f"generator.engine_init_kwargs.{name} is no keyword of the native engine"
                    + (f"; did you mean {nearest}?" if nearest else f"; it has {', '.join(known)}")
                )
        check_architecture(
            AutoConfig.from_pretrained(generator.model_name, trust_remote_code=True), generator.model_name
        )
        return
    parallel = generator.inference_engine_tensor_parallel_size
    if parallel == 1:
        return
    config = AutoConfig.from_pretrained(generator.model_name, trust_remote_code=True).get_text_config()
    heads = config.num_attention_heads
    if heads % parallel:
        divisors = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigError(
            f"generator.inference_engine_tensor_parallel_size={parallel} must divide the {heads} attention heads of "
            f"{generator.model_name}; it may be {', '.join(map(str, divisors))}"
        )


class EngineStarter:
    """Starts engines of the settings; the same again in place of one that died."""

    def __init__(self, cfg: SkyRLConfig, colocate_pg: "PlacementGroup | None", *, weights_follow: bool):
        self._launcher = make_launcher(cfg, colocate_pg)
        self._factory = engine_factory(cfg, cfg.trainer.placement.resolved_device(), weights_follow=weights_follow)

    def start(self, index: int) -> EngineHandle:
        """Engine `index`. Returns at once; calls wait until it is there."""
        return self._launcher.start_engine(index, self._factory)


def engine_factory(cfg: SkyRLConfig, device: str, *, weights_follow: bool = False) -> partial[InferenceEngineInterface]:
    """What makes one engine, in whichever process it will live."""
    generator = cfg.generator
    adapters_alone = generator.weight_sync_strategy == "adapter"
    settings: dict[str, Any] = dict(
        model_path=generator.model_name,
        device="cuda:0" if device == "cuda" else "cpu",  # Ray shows each process its GPUs alone
        dtype=generator.model_dtype,
        max_num_seqs=generator.max_num_seqs,
        dummy_weights=weights_follow and not adapters_alone,
        model_config_kwargs=cfg.trainer.policy.model_config_kwargs,
        seed=generator.seed,
    )
    if adapters_alone:
        settings["max_lora_rank"] = cfg.trainer.policy.model.lora.rank
    if generator.backend == "native":
        return partial(_make_native_engine, **(settings | generator.engine_init_kwargs))
    settings |= dict(
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        pipeline_parallel_size=generator.inference_engine_pipeline_parallel_size,
        data_parallel_size=generator.inference_engine_data_parallel_size,
        expert_parallel_size=generator.inference_engine_expert_parallel_size,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=generator.enable_prefix_caching,
        enable_chunked_prefill=generator.enable_chunked_prefill,
        fully_sharded_loras=generator.fully_sharded_loras,
        sleep_mode=device == "cuda" and cfg.trainer.placement.colocate_all,
        control_timeout_seconds=generator.engine_control_timeout_seconds,
    )
    if generator.backend == "vllm":
        return partial(_make_vllm_engine, **(settings | generator.engine_init_kwargs))
    settings |= dict(
        start_timeout_seconds=generator.engine_start_timeout_seconds,
        request_timeout_seconds=generator.request_timeout_seconds,
    )
    return partial(_make_sglang_engine, **(settings | generator.engine_init_kwargs))


def _make_native_engine(**settings: Any) -> InferenceEngineInterface:
    return NativeInferenceEngine(**settings)


def _make_vllm_engine(**settings: Any) -> InferenceEngineInterface:
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine  # an extra

    return VLLMInferenceEngine(**settings)


def _make_sglang_engine(**settings: Any) -> InferenceEngineInterface:
    from skyrl_train.inference_engines.sglang.engine import SGLangInferenceEngine  # an extra

    return SGLangInferenceEngine(**settings)


def remote_engine(
    generator: GeneratorConfig, url: str, tokenizer: PreTrainedTokenizerBase, backend: str | None = None
) -> RemoteInferenceEngine:
    """A server started elsewhere, checked.

    Args:
        backend: `vllm` or `sglang`; anything else: the server says what it is.

    Raises:
        ConfigError: it is not the one that the settings need.
        WorkerError: it cannot be reached, or does not answer.
    """
    engine = RemoteInferenceEngine(
        url,
        generator.model_name,
        backend=backend if backend in ("vllm", "sglang") else None,
        tokenizer=tokenizer,
        request_timeout_seconds=generator.request_timeout_seconds,
        control_timeout_seconds=generator.engine_control_timeout_seconds,
        api_key=remote_api_key(generator),
    )
    check_server(engine, tokenizer)
    return engine


def remote_api_key(generator: GeneratorConfig) -> SecretStr | None:
    """The key of servers started elsewhere: from the file of the settings, or from the environment."""
    file = generator.remote_inference_engine_api_key_file
    setting = "generator.remote_inference_engine_api_key_file"
    key = engine_api_key() if file is None else key_from_file(file, setting)
    return None if key is None else SecretStr(key)


def _remote_engines(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase) -> list[InferenceEngineInterface]:
    """The servers of `generator.remote_inference_engine_urls`, checked. Raises ConfigError where one does not fit."""
    engines: list[InferenceEngineInterface] = []
    for url in cfg.generator.remote_inference_engine_urls:
        try:
            engines.append(remote_engine(cfg.generator, url, tokenizer, cfg.generator.backend))
        except WorkerError as error:
            raise ConfigError(
                f"generator.remote_inference_engine_urls: {error}\nStart the server (docs/engines.md tells how), or "
                "correct its address"
            ) from error
    return engines
