"""A critic's values: one number for the state before each response token."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_train.errors import ConfigError
from skyrl_train.models.value_model import ValueModel, load_value_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("packing", [True, False])
def test_value_uses_hidden_state_before_token(tiny_model: str, packing, ragged):
    model = load_value_model(tiny_model, device=CPU, packing=packing)
    values = model(*ragged)
    model.backbone.set_attn_implementation("eager")
    for row, mask in enumerate(ragged.mask == 1):
        response = int(mask[-ragged.num_response :].sum())
        hidden = model.backbone(ragged.sequences[row][mask][None]).last_hidden_state[0]
        expected = (hidden[len(hidden) - response - 1 : -1] * model.value_head.weight).sum(-1)
        torch.testing.assert_close(values[row, :response], expected, atol=1e-5, rtol=1e-5)
        assert not values[row, response:].any()
    assert values.dtype == torch.float32


def test_packed_and_padded_critics_give_same_update(tiny_model: str, ragged):
    gradients = []
    for packing in (True, False):
        model = load_value_model(tiny_model, device=CPU, packing=packing).double()
        model(*ragged).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)
    assert gradients[0]["value_head.weight"].any() and gradients[0]["backbone.embed_tokens.weight"].any()


def test_value_head_init_is_small_and_seeded(tiny_model: str):
    heads = [load_value_model(tiny_model, device=CPU, seed=seed).head.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    wide = torch.nn.Module()
    wide.config = type("Config", (), {"get_text_config": lambda self: self, "hidden_size": 9999})()
    wide.register_parameter("any", torch.nn.Parameter(torch.zeros(1)))
    weight = ValueModel(wide, packing=False).head.weight
    assert weight.std().item() == pytest.approx(1 / math.sqrt(10000), rel=0.05)


def test_value_head_is_loaded_from_checkpoint(tiny_model: str, tmp_path: Path):
    model = load_value_model(tiny_model, device=CPU, head_name="score_of_state", seed=1)
    model.backbone.save_pretrained(tmp_path)
    save_file({"score_of_state.weight": model.head.weight.detach()}, tmp_path / "head.safetensors")
    again = load_value_model(str(tmp_path), device=CPU, head_name="score_of_state", seed=2)
    assert torch.equal(again.head.weight, model.head.weight)
    assert "score_of_state.weight" in again.state_dict()
    other = load_value_model(str(tmp_path), device=CPU, head_name="value_head", seed=2)
    assert not torch.equal(other.head.weight, model.head.weight)
    assert list(load_file(tmp_path / "head.safetensors")) == ["score_of_state.weight"]


def test_duplicate_name_is_rejected(tiny_model: str):
    with pytest.raises(ConfigError, match="value_head_prefix"):
        load_value_model(tiny_model, device=CPU, head_name="forward")
