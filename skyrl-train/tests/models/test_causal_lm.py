"""Models as they are loaded for training."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

from skyrl_train.errors import ConfigError
from skyrl_train.models.causal_lm import load_causal_lm, select_attention_implementation

CPU = torch.device("cpu")


def test_dropout_is_disabled_in_modules_and_attention(tmp_path):
    """Dropout would make the log-probs of a training forward differ from the rollout's."""
    GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.5)).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), device=CPU)
    assert model.training and model.config.attn_pdrop == 0.0
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_unknown_config_field_is_rejected(tiny_model: str):
    assert load_causal_lm(tiny_model, device=CPU, config_overrides={"rms_norm_eps": 0.5}).config.rms_norm_eps == 0.5
    with pytest.raises(ConfigError, match=r"model_config_kwargs\.rope_thetaa"):
        load_causal_lm(tiny_model, device=CPU, config_overrides={"rope_thetaa": 1.0})


def test_model_uses_builtin_attention_without_flash_attn(tiny_model: str):
    assert load_causal_lm(tiny_model, device=CPU, flash_attn=False).config._attn_implementation == "eager"
    assert select_attention_implementation(True, CPU) == "sdpa"


def test_padded_rows_use_eager_attention_without_fused_kernel(tmp_path):
    config = GptOssConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    assert load_causal_lm(str(tmp_path), device=CPU).config._attn_implementation == "eager"
