"""Linear layers computed by oneDNN are the layers they replace, to rounding."""

import pytest
import torch
from torch import nn

from skyrl_train.models.cpu_linear import OneDnnLinear, enable_onednn_linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (1, 1, 24), (2, 60, 24)])
def test_outputs_and_gradients_match_replaced_layer(shape, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias))
    inputs = torch.randn(shape, requires_grad=True)
    results = []
    for change in (lambda _: None, enable_onednn_linear):
        change(model)
        model.zero_grad()
        inputs.grad = None
        output = model(inputs)
        output.square().sum().backward()
        assert inputs.grad is not None
        results.append([output.detach(), inputs.grad, *(p.grad.clone() for p in model.parameters())])
    assert isinstance(model[0], OneDnnLinear)
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_frozen_layer_propagates_gradients():
    layer = nn.Sequential(nn.Linear(4, 3, bias=False))
    enable_onednn_linear(layer)
    layer.requires_grad_(False)
    inputs = torch.ones(2, 4, requires_grad=True)
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, layer[0].weight.sum(dim=0).expand(2, 4))


def test_other_devices_are_unchanged():
    model = nn.Sequential(nn.Linear(8, 3, bias=False))
    enable_onednn_linear(model)
    assert model.to("meta")(torch.empty(2, 8, device="meta")).shape == (2, 3)  # oneDNN would refuse it


def test_bfloat16_result_is_unchanged():
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    inputs = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = layer(inputs)
    model = nn.Sequential(layer)
    enable_onednn_linear(model)
    assert torch.equal(model(inputs), expected)
