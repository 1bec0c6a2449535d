"""What an engine of another library is told when it starts, in our words; its `arguments` module has the library's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The start of a vLLM or SGLang engine."""

    model_path: str
    """A local folder or a hub name, with a tokenizer."""
    device: str = "cpu"
    """`cpu` or `cuda`; which GPUs, `CUDA_VISIBLE_DEVICES` says."""
    dtype: str = "bfloat16"
    """`float32`, `bfloat16` or `float16`."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    """Tokens of prompt and response; None: the model's."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    fully_sharded_loras: bool = False
    max_lora_rank: int = 0
    """The largest adapter; 0: none can be loaded."""
    sleep_mode: bool = False
    """On CUDA, `sleep` frees the memory of weights and cache."""
    seed: int = 0
    model_config_kwargs: Mapping[str, Any] | None = None
    """Changes to the model's config."""
    dummy_weights: bool = False
    """Random weights; the first update must bring all of them."""
    engine_init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The library's own settings, which win over all of the above."""

    @classmethod
    def of(cls, model_path: str, given: Mapping[str, Any]) -> "EngineSettings":
        """Of keywords: ours, and the library's own beside them."""
        names = {field.name for field in fields(cls)}
        ours = {name: value for name, value in given.items() if name in names}
        others = {name: value for name, value in given.items() if name not in names}
        return cls(model_path=model_path, **ours, engine_init_kwargs=others)
