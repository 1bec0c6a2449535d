"""Decoder layers with fewer kernels: the numbers of transformers' layers, and copies that are told from old ones."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from native_runs import log_probs_of, random_prompts, run
from transformers.models.llama.modeling_llama import LlamaMLP

from skyrl_train.inference_engines.native import fused_layers, packed_linear
from skyrl_train.inference_engines.native.attention import ATTENTION_NAME
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.fused_layers import FusedDecoder, fuse_layers
from skyrl_train.inference_engines.native.packed_linear import can_pack, find_stale_copies, pack_linears
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.weight_sync.fingerprint import VerificationSample

_KINDS: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True),
    "mistral": dict(sliding_window=20),
    "qwen2": {},
    "qwen3": dict(head_dim=16),
}


def make_model(kind: str) -> Any:
    """Two layers, whose biases and norms are not those of the start."""
    config = hf.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        **_KINDS[kind],
    )
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def expect_log_probs_of(reference: Any, model: Any, lengths: list[int], max_tokens: int) -> None:
    """Generate behind random prompts of these lengths, and compare."""
    core = NativeEngineCore(model, max_num_seqs=8, max_model_len=256, eos_ids=(), decode=lambda ids: "")
    params = EngineSamplingParams(max_tokens=max_tokens)
    requests = [Request(prompt, params, (0, 0)) for prompt in random_prompts(lengths)]
    for request, answer in zip(requests, run(core, requests), strict=True):
        _, expected = log_probs_of(reference, request.prompt, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", _KINDS)
def test_fused_layers_equal_transformers_log_probs(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_linear, "SMALLEST", 0)
    monkeypatch.setattr(fused_layers, "_PART", 64)
    model = make_model(kind)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    fuse_layers(model)
    pack_linears(model)
    assert isinstance(model.model.forward, FusedDecoder)
    expect_log_probs_of(reference, model, [150, 20, 1], 9)


class GatedMLP(LlamaMLP):
    """A part of one's own that changes nothing until its gate is trained."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.gate = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.gate) * super().forward(x)


def replace_mlp(model: Any) -> None:
    for layer in model.model.layers:
        mlp = GatedMLP(model.config)
        mlp.load_state_dict(layer.mlp.state_dict(), strict=False)
        layer.mlp = mlp.requires_grad_(False)


def add_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 0.5 * output)


def replace_forward(model: Any) -> None:
    layer = model.model.layers[1].input_layernorm
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


@pytest.mark.parametrize("change", [replace_mlp, add_hook, replace_forward])
def test_custom_decoder_part_is_used(change: Any):
    model = make_model("llama")
    change(model)
    reference = copy.deepcopy(model)
    change(reference) if change is replace_forward else None  # its copy has the forward of the original
    reference.set_attn_implementation("eager")
    fuse_layers(model)
    assert not isinstance(model.model.forward, FusedDecoder)
    for each in (model, reference):
        for name, parameter in each.named_parameters():
            if name.endswith("gate"):
                parameter.fill_(-0.7)
    expect_log_probs_of(reference, model, [40], 5)


def test_embeddings_passed_to_decoder_are_used():
    class Scaled(hf.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **keywords: Any) -> Any:
            return super().forward(inputs_embeds=3 * self.get_input_embeddings()(input_ids), **keywords)

    model = make_model("llama")
    model.__class__ = Scaled
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    fuse_layers(model)
    assert isinstance(model.model.forward, FusedDecoder)
    expect_log_probs_of(reference, model, [40], 5)


@pytest.mark.parametrize("kind", _KINDS)
def test_fused_layers_round_bfloat16_like_transformers(kind: str):
    """Trainer and engine then have the same log-probs, but for sums of float32 that fall beside a rounding."""
    found = []
    for change in (lambda model: None, fuse_layers):
        model = make_model(kind).to(torch.bfloat16)
        change(model)
        core = NativeEngineCore(model, max_num_seqs=8, max_model_len=256, eos_ids=(), decode=lambda ids: "")
        params = EngineSamplingParams(max_tokens=1, prompt_logprobs=0)
        answers = run(core, [Request(prompt, params, (0, 0)) for prompt in random_prompts([150, 20, 1])])
        found.append(torch.cat([torch.tensor(answer.prompt_log_probs) for answer in answers]))
    plain, fused = found
    assert (plain == fused).float().mean() > 0.6
    torch.testing.assert_close(fused, plain, atol=0.03, rtol=0)


@pytest.mark.skipif(not can_pack(), reason="this torch packs no linear layers")
@pytest.mark.parametrize("changed", ["k_proj.weight", "k_proj.bias"])
def test_stale_part_of_packed_copy_is_named(changed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_linear, "SMALLEST", 0)
    model, sampling = make_model("qwen2"), VerificationSample(1, "full")
    fuse_layers(model)
    pack_linears(model)
    assert find_stale_copies(model, sampling) == []
    model.get_parameter(f"model.layers.1.self_attn.{changed}").add_(1)
    assert find_stale_copies(model, sampling) == ["model.layers.1.self_attn.k_proj"]
    pack_linears(model)
    assert find_stale_copies(model, sampling) == []
