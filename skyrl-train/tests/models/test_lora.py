"""Adapters: which layers get one, that they alone are trained, and that they leave as one expects."""

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.config import LoRAConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.adapter_files import load_adapter, save_adapter
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.cpu_linear import OneDnnLinear
from skyrl_train.models.lora import Adapter, add_adapters, find_adapters, gather_exported_parameters

CPU = torch.device("cpu")
IDS = torch.randint(2, 64, (3, 10), generator=torch.Generator().manual_seed(0))
RANK_4 = LoRAConfig(rank=4, alpha=8)


def load(path: str, **kwargs) -> PreTrainedModel:
    model = load_causal_lm(path, device=CPU, **kwargs)
    assert isinstance(model, PreTrainedModel)
    return model


def adapted(path: str, config: LoRAConfig = RANK_4, **kwargs) -> PreTrainedModel:
    torch.manual_seed(1)
    model = load(path, **kwargs)
    add_adapters(model, config)
    return model


def disturb(model: nn.Module) -> None:
    """Adapters far from where they began: as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for adapter in find_adapters(model):
            for matrix in adapter.matrices.values():
                matrix.add_(torch.randn(matrix.shape, generator=generator) * 0.1)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_all_linear_layers_except_output_get_adapters(tiny_model):
    model = adapted(tiny_model)
    layers = [adapter.layer for adapter in find_adapters(model)]
    of_a_block = ["self_attn." + n for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    of_a_block += ["mlp." + n for n in ("gate_proj", "up_proj", "down_proj")]
    assert layers == [f"model.layers.{block}.{name}" for block in (0, 1) for name in of_a_block]
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(matrix) for adapter in find_adapters(model) for matrix in adapter.matrices.values()}


def test_adapter_layers_can_be_included_and_excluded(tiny_model):
    model = adapted(tiny_model, LoRAConfig(rank=2, target_modules=["q_proj", "v_proj"], exclude_modules=".*layers.1.*"))
    assert [a.layer for a in find_adapters(model)] == [f"model.layers.0.self_attn.{n}_proj" for n in "qv"]


def test_new_adapters_have_no_effect(tiny_model):
    assert torch.equal(logits(adapted(tiny_model)), logits(load(tiny_model)))


def test_adapter_init_is_equal_on_all_ranks(tiny_model):
    first, second = adapted(tiny_model), adapted(tiny_model)
    assert all(torch.equal(a.a, b.a) for a, b in zip(find_adapters(first), find_adapters(second), strict=True))


def test_merged_weight_matches_manual_result():
    """scaling B A = 0.5 [1, 2]^T [1, 3] = [[0.5, 1.5], [1, 3]]"""
    adapter = Adapter(
        layer="",
        a=nn.Parameter(torch.tensor([[1.0, 3.0]])),
        b=nn.Parameter(torch.tensor([[1.0], [2.0]])),
        scaling=0.5,
        is_transposed=False,
    )
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert adapter.merge_into(weight).tolist() == [[1.5, 3.5], [4.0, 7.0]]
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_parameters_without_adapters_are_exported_unchanged(tiny_model):
    model = load(tiny_model)
    exported = dict(gather_exported_parameters(model))
    assert list(exported) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(exported[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("init_method", ["kaiming", "gaussian", "pissa", "olora"])
def test_peft_loads_saved_adapter(tiny_model, tmp_path, init_method):
    """PiSSA and OLoRA move a part of the weights into the adapter; peft does the same again when it loads."""
    model = adapted(tiny_model, LoRAConfig(rank=4, alpha=8, init_method=init_method))
    torch.testing.assert_close(logits(model), logits(load(tiny_model)), atol=2e-4, rtol=1e-4)
    disturb(model)
    save_adapter(model, tmp_path, tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = logits(model)
    assert (logits(base) - expected).abs().max() > 0.1
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(logits(loaded), expected, atol=1e-4, rtol=1e-5)
    assert loaded.peft_config["default"].base_model_name_or_path == tiny_model
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_saved_adapters_are_loaded_back(tiny_model, tmp_path):
    model = adapted(tiny_model)
    disturb(model)
    save_adapter(model, tmp_path, tiny_model)
    other = adapted(tiny_model)
    assert not torch.equal(logits(other), logits(model))
    load_adapter(other, tmp_path)
    assert torch.equal(logits(other), logits(model))


def test_adapters_with_other_rank_or_layers_are_rejected(tiny_model, tmp_path):
    save_adapter(adapted(tiny_model), tmp_path, tiny_model)
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A\.weight"):
        load_adapter(adapted(tiny_model, LoRAConfig(rank=2)), tmp_path)
    with pytest.raises(CheckpointError, match=r"down_proj\.lora_A\.weight"):
        load_adapter(adapted(tiny_model, LoRAConfig(rank=4, target_modules=["q_proj"])), tmp_path)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_unchanged_by_activation_checkpointing(tiny_model, use_reentrant):
    """Everything before the first adapter is frozen: nothing there asks for a gradient by itself."""
    gradients = []
    for checkpointing in (False, True):
        model = adapted(tiny_model, gradient_checkpointing=checkpointing, use_reentrant=use_reentrant)
        disturb(model)
        model(IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-6)


def test_adapters_use_onednn_when_layer_does(tiny_model):
    model = adapted(tiny_model)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    kinds = {name: type(module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    assert list(kinds) == ["base_layer", "lora_A.default", "lora_B.default"]
    assert len(set(kinds.values())) == 1
    assert set(kinds.values()) == {OneDnnLinear if torch.backends.mkldnn.is_available() else nn.Linear}


@pytest.fixture
def moe_model(save_mixture, tmp_path) -> str:
    return save_mixture(tmp_path / "mixture", mlp_only_layers=[1])  # the second block has no experts


def test_fused_experts_get_no_adapter_with_warning(moe_model, tmp_path, caplog):
    with caplog.at_level("INFO"):
        model = adapted(moe_model)
    assert "experts and routers have no adapters" in caplog.text
    names = [f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qkvo"]
    assert [adapter.layer for adapter in find_adapters(model)] == names
    disturb(model)
    save_adapter(model, tmp_path, moe_model)
    expected, exported = logits(model), dict(gather_exported_parameters(model))
    base = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    assert list(exported) == [name for name, _ in base.named_parameters()]
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, str(tmp_path))), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # peft's, before we refuse
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"target_modules": ["q_proj", "no_such"], "exclude_modules": ["q_proj"]}, "target_modules="),
        ({"target_modules": ["no_such"]}, r"model.lora.target_modules=\['no_such'\].*not found"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["embed_tokens"]}, "model.embed_tokens"),
        ({"init_method": "kaming"}, "model.lora.init_method"),
        ({"init_method": "eva"}, "must be one of"),  # needs data
    ],
)
def test_layers_without_adapter_support_are_rejected_by_name(tiny_model, settings, message):
    with pytest.raises(ConfigError, match=message):
        adapted(tiny_model, LoRAConfig(rank=4, **settings))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_experts_named_as_layers_are_rejected(moe_model):
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts"):
        adapted(moe_model, LoRAConfig(rank=4, target_modules=["gate_proj", "up_proj", "down_proj"]))
