"""Registration of the SGLang engine."""

from typing import TYPE_CHECKING, Any

from skyrl_train.config.engine_kinds import EngineTraits, register_engine
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.engine_settings import EngineSettings, build_library_keywords, check_division

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig


def _build_keywords(cfg: "SkyRLConfig", device: str) -> dict[str, Any]:
    return build_library_keywords(cfg, device) | {
        "start_timeout_seconds": cfg.generator.engine_start_timeout_seconds,
        "request_timeout_seconds": cfg.generator.request_timeout_seconds,
    }


def _check_settings(generator: GeneratorConfig) -> None:
    """Raise ConfigError for unsupported settings: SGLang passes weights only to the processes of one tensor-parallel
    group.
    """
    for kind, name in (("pipeline", "pp_size"), ("data", "dp_size")):
        setting = f"generator.inference_engine_{kind}_parallel_size"
        size = getattr(generator, f"inference_engine_{kind}_parallel_size")
        if name in generator.engine_init_kwargs:
            setting, size = f"generator.engine_init_kwargs.{name}", generator.engine_init_kwargs[name]
        if size != 1:
            raise ConfigError(
                f"{setting}={size} must be 1 with generator.backend=sglang: SGLang takes weights of a trainer in the "
                "processes of one tensor-parallel group alone. Raise generator.num_inference_engines for copies of "
                "the model, generator.inference_engine_tensor_parallel_size for a large one, or use "
                "generator.backend=vllm"
            )


def _load_server_protocol() -> Any:
    from skyrl_train.inference_engines.remote.sglang import SGLangProtocol

    return SGLangProtocol


@register_engine(
    "sglang",
    settings=EngineSettings,
    requires=EngineTraits(
        library="sglang",
        copies_weights_asleep=True,  # `enable_weights_cpu_backup` in `arguments.py`
        server_protocol=_load_server_protocol,
        attention_choice=True,
        adapter_slots=("max_loras_per_batch", 2),  # an evicted adapter may still serve running requests
        keywords=_build_keywords,
        check_settings=_check_settings,
        check_model=check_division,
    ),
)
def make_sglang_engine(**keywords: Any) -> Any:
    """Build the engine."""
    from skyrl_train.inference_engines.sglang.engine import SGLangInferenceEngine  # an optional dependency

    return SGLangInferenceEngine(**keywords)
