"""Shapes of models from their configs alone."""

from pathlib import Path

import pytest
import torch

from skyrl_train.config.models import LoRAConfig
from skyrl_train.errors import ConfigError
from skyrl_train.memory_plan.model_shape import ModelShape, compute_model_shape, load_model_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    """The config of a one-layer model, without any weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def shape_of(path: str, **arguments: object) -> ModelShape:
    return compute_model_shape(load_model_config(path, "trainer.policy.model.path"), **arguments)  # type: ignore[arg-type]


def test_model_shape_derives_from_config(llama: str):
    # Attention q 8x8, k and v 8x4, o 8x8; feed-forward 3 x 8x12; two norms of 8. Outside: 2 x 11 x 8 and a norm.
    layer = (64 + 32 + 32 + 64) + 3 * 96 + 2 * 8
    found = shape_of(llama)
    assert (found.layer, found.outside, found.parameters) == (layer, 2 * 88 + 8, layer + 2 * 88 + 8)
    assert (found.query, found.key, found.feed_forward, found.words) == (8, 4, 12, 11)
    assert found.trained == found.active == found.parameters and not found.has_adapters
    assert shape_of(llama, overrides={"intermediate_size": 13}).layer == layer + 3 * 8


def test_critic_has_values_in_place_of_words(llama: str):
    critic = shape_of(llama, is_critic=True)
    assert (critic.words, critic.parameters) == (0, shape_of(llama).parameters - 88 + 8)


def test_mixture_token_uses_active_experts_only(tmp_path: Path):
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, moe_intermediate_size=6, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[],
    ).save_pretrained(tmp_path)  # fmt: skip
    found = shape_of(str(tmp_path))
    assert found.experts == 2 * 4 * 3 * 8 * 6
    assert found.active == found.parameters - found.experts // 2
    assert found.feed_forward == 2 * 6 and found.has_query_norms


def test_adapters_are_counted_as_peft_makes_them(llama: str):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    for target in ("all-linear", ["q_proj", "down_proj"]):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama))
            adapted = get_peft_model(model, LoraConfig(r=3, target_modules=target))
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        assert shape_of(llama, lora=LoRAConfig(rank=3, target_modules=target)).trained == trained


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nobody/no-such-model", "--config-file"),
        ("/no/such", "no config.json"),
    ],
)
def test_unreadable_config_is_error_with_remedy(path: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load_model_config(path, "trainer.policy.model.path")
