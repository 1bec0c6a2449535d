"""Common settings of third-party engines; each engine's `arguments` module translates them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_train.config import GeneratorConfig, SkyRLConfig


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Start settings of a vLLM or SGLang engine."""

    model_path: str
    """Local folder or hub name, with a tokenizer."""
    device: str = "cpu"
    """`cpu` or `cuda`; `CUDA_VISIBLE_DEVICES` selects the GPUs."""
    dtype: str = "bfloat16"
    """`float32`, `bfloat16` or `float16`."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    """Maximum tokens of prompt and response; None: the model's limit."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    fully_sharded_loras: bool = False
    max_lora_rank: int = 0
    """Largest adapter rank; 0: adapters are disabled."""
    sleep_mode: bool = False
    """Free the memory of weights and cache in `sleep` (CUDA only)."""
    seed: int = 0
    model_config_kwargs: Mapping[str, object] | None = None
    """Changes to the model's config."""
    dummy_weights: bool = False
    """Start with random weights; the first update must contain all of them."""
    engine_init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The library's own settings; they override all of the above."""

    @classmethod
    def from_keywords(cls, model_path: str, given: Mapping[str, Any]) -> "EngineSettings":
        """Build settings from keywords; unknown keywords are passed to the library."""
        names = {field.name for field in fields(cls)}
        ours = {name: value for name, value in given.items() if name in names}
        others = {name: value for name, value in given.items() if name not in names}
        return cls(model_path=model_path, **ours, engine_init_kwargs=others)


def build_library_keywords(cfg: "SkyRLConfig", device: str) -> dict[str, object]:
    """Build the keywords of third-party engines from a run's settings, in addition to the common ones."""
    generator = cfg.generator
    return dict(
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        pipeline_parallel_size=generator.inference_engine_pipeline_parallel_size,
        data_parallel_size=generator.inference_engine_data_parallel_size,
        expert_parallel_size=generator.inference_engine_expert_parallel_size,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        enforce_eager=generator.resolve_enforce_eager("cuda" if device == "cuda" else "cpu"),
        enable_prefix_caching=generator.enable_prefix_caching,
        enable_chunked_prefill=generator.enable_chunked_prefill,
        fully_sharded_loras=generator.fully_sharded_loras,
        sleep_mode=device == "cuda" and cfg.trainer.placement.colocate_all,
        control_timeout_seconds=generator.engine_control_timeout_seconds,
    )


def check_division(generator: "GeneratorConfig") -> None:
    """Raise ConfigError if the model cannot be divided over the ranks of tensor parallelism."""
    parallel = generator.inference_engine_tensor_parallel_size
    if parallel == 1:
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(generator.model_name, trust_remote_code=True).get_text_config()
    heads = config.num_attention_heads
    if heads % parallel:
        divisors = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigError(
            f"generator.inference_engine_tensor_parallel_size={parallel} must divide the {heads} attention heads of "
            f"{generator.model_name}; valid values: {', '.join(map(str, divisors))}"
        )
