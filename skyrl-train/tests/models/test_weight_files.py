"""Weights and buffers read in parts are those of `from_pretrained`, bit for bit; what cannot be read so is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from skyrl_train.config import LoRAConfig
from skyrl_train.models.causal_lm import load_backbone, load_causal_lm
from skyrl_train.models.lora import add_adapters
from skyrl_train.models.weight_files import (
    UnreadableWeights,
    WeightFiles,
    apply_dtype_plan,
    fill_buffers,
    load_values_in_forward,
    use_placeholders,
)
from skyrl_train_testing.tiny_models import build_tiny_mixture, build_tiny_qwen3

CPU = torch.device("cpu")
SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=512)
LLAMA3 = dict(rope_type="llama3", factor=8.0, rope_theta=5e5, original_max_position_embeddings=512)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
SPARSE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, n_group=1, topk_group=1
)


def build(kind: type, config: type, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(config(**(SIZES | settings)))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: build_tiny_qwen3(hidden_size=32, vocab_size=64),
    "qwen3 moe": build_tiny_mixture,
    "qwen3 next": lambda: build(
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig,
        **SPARSE,
        num_experts=4,
        shared_expert_intermediate_size=16,
        head_dim=8,
        num_hidden_layers=4,
    ),
    "qwen2": lambda: build(hf.Qwen2ForCausalLM, hf.Qwen2Config),
    "llama, rotary frequencies of llama3": lambda: build(hf.LlamaForCausalLM, hf.LlamaConfig, rope_parameters=LLAMA3),
    "llama, rotary frequencies of yarn": lambda: build(hf.LlamaForCausalLM, hf.LlamaConfig, rope_parameters=YARN),
    "mistral": lambda: build(hf.MistralForCausalLM, hf.MistralConfig),
    "mixtral": lambda: build(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4),
    "gemma2": lambda: build(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=8),
    "gemma3": lambda: build(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, head_dim=8),
    "deepseek v3": lambda: build(
        hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, **SPARSE, **LATENT, n_routed_experts=4, first_k_dense_replace=1
    ),
    "glm4 moe": lambda: build(
        hf.Glm4MoeForCausalLM, hf.Glm4MoeConfig, **SPARSE, n_routed_experts=4, first_k_dense_replace=1, head_dim=8
    ),
    "gpt oss": lambda: build(hf.GptOssForCausalLM, hf.GptOssConfig, num_local_experts=4, head_dim=8),
    "granite": lambda: build(hf.GraniteForCausalLM, hf.GraniteConfig),
    "cohere": lambda: build(hf.CohereForCausalLM, hf.CohereConfig),
    "olmo2": lambda: build(hf.Olmo2ForCausalLM, hf.Olmo2Config),
    "phi": lambda: build(hf.PhiForCausalLM, hf.PhiConfig),
    "phi3": lambda: build(hf.Phi3ForCausalLM, hf.Phi3Config),
    "gpt2": lambda: build(hf.GPT2LMHeadModel, hf.GPT2Config, n_embd=32, n_layer=2, n_head=4),
    "gpt neox": lambda: build(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig),
    "bloom": lambda: build(hf.BloomForCausalLM, hf.BloomConfig),
    "falcon": lambda: build(hf.FalconForCausalLM, hf.FalconConfig, new_decoder_architecture=False, alibi=False),
    "opt": lambda: build(hf.OPTForCausalLM, hf.OPTConfig, word_embed_proj_dim=32, ffn_dim=64),
}


def loaded_both_ways(folder: str, load: Any, **options: Any) -> tuple[nn.Module, PreTrainedModel, WeightFiles]:
    whole = load(folder, device=CPU, **options)
    parts = load(folder, device=CPU, with_weights=False, **options)
    files = WeightFiles(parts, folder)
    fill_buffers(parts, files)
    return whole, parts, files


EAGER = {"gpt oss", "bloom"}
"""Families with attention of their own alone."""

DAILY = {"qwen3", "qwen3 moe", "gemma3", "deepseek v3"}
"""Tied, fused, windows in some layers, a buffer that is stored."""


@pytest.mark.parametrize("load", [load_causal_lm, load_backbone])
@pytest.mark.parametrize(
    "family", [family if family in DAILY else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_shards_match_whole_model(family: str, load: Any, tmp_path: Path):
    FAMILIES[family]().save_pretrained(tmp_path)
    whole, parts, files = loaded_both_ways(str(tmp_path), load, flash_attn=family not in EAGER)
    weights, shapes = dict(whole.named_parameters()), dict(parts.named_parameters())
    assert list(weights) == list(shapes)
    assert load is load_backbone or str(whole.generation_config) == str(parts.generation_config)
    for name, weight in weights.items():
        assert shapes[name].is_meta and shapes[name].dtype == weight.dtype
        end = weight.shape[0]
        for start, stop in ((0, None), (0, 1), (1, min(3, end)), (end // 2, end // 2), (end, end)):
            assert torch.equal(files.read(name, start, stop), weight[start:stop]), (name, start, stop)
    buffers, found = dict(whole.named_buffers()), dict(parts.named_buffers())
    assert buffers.keys() == found.keys()
    for name, buffer in buffers.items():
        assert found[name].dtype == buffer.dtype and torch.equal(found[name], buffer), name
    files.close()


@pytest.mark.parametrize("max_numbers", [0, 10**6])
@pytest.mark.parametrize("family", ["qwen3", "qwen3 moe", "gpt2"])
def test_block_weights_exist_only_during_forward_in_low_memory_mode(family: str, max_numbers: int, tmp_path: Path):
    FAMILIES[family]().save_pretrained(tmp_path)
    whole, parts, files = loaded_both_ways(str(tmp_path), load_causal_lm)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad(), load_values_in_forward(parts, files, max_numbers):
        logits = parts(input_ids=ids, use_cache=False).logits
        tied = parts.lm_head.weight is parts.get_input_embeddings().weight
        assert tied == parts.config.tie_word_embeddings
        first, last = (next(layers_of(parts)[i].parameters()).is_meta for i in (0, -1))
        assert (first, last) == (max_numbers == 0, max_numbers == 0)
    assert torch.equal(logits, whole(input_ids=ids, use_cache=False).logits)
    assert all(parameter.is_meta for parameter in parts.parameters())


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def test_rank_reads_only_local_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build_tiny_mixture().save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), device=CPU, with_weights=False)
    files, read = WeightFiles(model, str(tmp_path)), []
    plain = files._read_tensor
    monkeypatch.setattr(files, "_read_tensor", lambda key, *args: read.append(key) or plain(key, *args))
    files.read("model.layers.0.mlp.experts.gate_up_proj", 1, 3)
    assert sorted(read) == [
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in (1, 2) for part in ("gate", "up")
    ]


@pytest.mark.parametrize("init_method", ["kaiming", "gaussian", "orthogonal"])
def test_adapter_init_matches_fully_loaded_model(init_method: str, tiny_model: str):
    lora = LoRAConfig(rank=4, init_method=init_method)
    whole = load_causal_lm(tiny_model, device=CPU)
    parts = load_causal_lm(tiny_model, device=CPU, with_weights=False)
    torch.manual_seed(0)
    add_adapters(whole, lora)
    torch.manual_seed(0)
    with use_placeholders(parts):
        add_adapters(parts, lora)
    found = dict(parts.named_parameters())
    files = WeightFiles(parts, tiny_model)
    for name, weight in whole.named_parameters():
        assert found[name].requires_grad == weight.requires_grad
        assert found[name].is_meta == (name in files)
        assert torch.equal(files.read(name) if name in files else found[name], weight), name


def test_float32_weights_match_transformers(tmp_path: Path):
    model = build(hf.Qwen2ForCausalLM, hf.Qwen2Config).bfloat16()
    model.save_pretrained(tmp_path)
    kind = type("Strict", (hf.Qwen2ForCausalLM,), {"_keep_in_fp32_modules_strict": {"norm"}})
    whole = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.device("meta"):
        parts = kind._from_config(whole.config, dtype=torch.bfloat16)
    apply_dtype_plan(parts, torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in parts.named_parameters()}
    assert dtypes == {name: weight.dtype for name, weight in whole.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}


def missing(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.norm.weight"]


def misshapen(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(3)


def twice(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def of_integers(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)


@pytest.mark.parametrize(
    "change, reason",
    [
        (missing, "model.norm.weight is missing in the files"),
        (misshapen, r"model.norm.weight has the shape \[3\] in the files and \[32\] in the model"),
        (twice, "lm_head"),
        (of_integers, "model.norm.weight has the dtype I8"),
    ],
)
def test_unshardable_weights_are_named_in_error(change: Any, reason: str, tmp_path: Path):
    build_tiny_qwen3(hidden_size=32, vocab_size=64).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnreadableWeights, match=reason):
        WeightFiles(load_causal_lm(str(tmp_path), device=CPU, with_weights=False), str(tmp_path))


def test_pickled_and_quantized_weights_are_named_in_error(tmp_path: Path):
    model = build_tiny_qwen3(hidden_size=32, vocab_size=64)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    parts = load_causal_lm(str(tmp_path), device=CPU, with_weights=False)
    with pytest.raises(UnreadableWeights, match="safetensors"):
        WeightFiles(parts, str(tmp_path))
    parts.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnreadableWeights, match="its weights are quantized"):
        WeightFiles(parts, str(tmp_path))
