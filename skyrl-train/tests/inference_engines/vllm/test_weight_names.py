"""The trainer's names of tensors in the names of a vLLM model, on modules named as vLLM's are."""

import torch
from torch import nn

from skyrl_train.inference_engines.vllm.weight_names import WeightNames

EXPERTS = torch.arange(2 * 4 * 3).reshape(2, 4, 3)  # two experts: two rows of the gate's, then two of the up's


def model_with(block: str, gate: str, down: str) -> nn.Module:
    """One layer with a mixture under the name `block`, whose experts have these names in checkpoints."""
    experts = nn.Module()
    experts.routed_experts = nn.Module()
    experts.routed_experts.ckpt_gate_proj_name, experts.routed_experts.ckpt_down_proj_name = gate, down
    mixture = nn.Module()
    mixture.gate, mixture.experts = nn.Linear(3, 2, bias=False), experts
    model = nn.Module()
    model.layer = nn.Module()
    setattr(model.layer, block, mixture)
    return model


def test_mixture_weights_get_checkpoint_names():
    names = WeightNames(model_with("block_sparse_moe", "w1", "w2"))
    router, down = torch.zeros(2, 3), torch.arange(12).reshape(2, 3, 2)
    given = {
        "layer.mlp.gate.weight": router,
        "layer.mlp.experts.gate_up_proj": EXPERTS,
        "layer.mlp.experts.down_proj": down,
    }
    found = dict(pair for name, tensor in given.items() for pair in names.iter_checkpoint_tensors(name, tensor))
    path = "layer.block_sparse_moe"
    expected = {
        f"{path}.gate.weight": router,
        f"{path}.experts.0.w1.weight": EXPERTS[0, :2],
        f"{path}.experts.0.w3.weight": EXPERTS[0, 2:],
        f"{path}.experts.1.w1.weight": EXPERTS[1, :2],
        f"{path}.experts.1.w3.weight": EXPERTS[1, 2:],
        f"{path}.experts.0.w2.weight": down[0],
        f"{path}.experts.1.w2.weight": down[1],
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert names.to_vllm("layer.mlp.experts.gate_up_proj") == f"{path}.experts.w13"


def test_equal_names_are_unchanged():
    names = WeightNames(model_with("mlp", "gate_proj", "down_proj"))
    for name in ("layer.mlp.gate.weight", "layer.mlp.experts.gate_up_proj", "layer.norm.weight", "lm_head.weight"):
        [(found, tensor)] = names.iter_checkpoint_tensors(name, EXPERTS)
        assert found == name == names.to_vllm(name)
        assert tensor is EXPERTS
