"""Registration of the native engine: transformers models in an in-process generation loop."""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from skyrl_gym.suggestions import did_you_mean
from skyrl_train.config.engine_kinds import PREFIX_CACHE_GIB, EngineTraits, register_engine
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine


def _check_model(generator: GeneratorConfig) -> None:
    """Raise ConfigError for an unknown keyword or an unsupported model."""
    from transformers import AutoConfig

    from skyrl_train.inference_engines.native.architecture import check_architecture

    if generator.engine_init_kwargs:
        _check_keywords(generator.engine_init_kwargs)
    check_architecture(AutoConfig.from_pretrained(generator.model_name, trust_remote_code=True), generator.model_name)


def _check_keywords(keywords: Iterable[str]) -> None:
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

    known = list(inspect.signature(NativeInferenceEngine).parameters)
    for name in keywords:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"generator.engine_init_kwargs.{name} is not a parameter of the native engine; {hint}")


def _build_keywords(cfg: "SkyRLConfig", device: str) -> dict[str, Any]:
    generator = cfg.generator
    return dict(
        enforce_eager=generator.resolve_enforce_eager("cuda" if device == "cuda" else "cpu"),
        enable_prefix_caching=generator.enable_prefix_caching,
        enable_chunked_prefill=generator.enable_chunked_prefill,
    )


@register_engine(
    "native",
    requires=EngineTraits(
        automatic={"cpu": 0, "cuda": 0},
        unread_settings=(
            *(f"inference_engine_{kind}_parallel_size" for kind in ("tensor", "pipeline", "data", "expert")),
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "fully_sharded_loras",
        ),
        is_in_process=True,
        reserves_memory=False,
        prefix_cache_gib=PREFIX_CACHE_GIB,
        packs_weights=True,
        output_layer_adapters=True,
        expert_routes=True,
        kept_tokens=True,
        keywords=_build_keywords,
        check_model=_check_model,
    ),
)
def make_native_engine(**keywords: Any) -> "NativeInferenceEngine":
    """Build the engine."""
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

    return NativeInferenceEngine(**keywords)
