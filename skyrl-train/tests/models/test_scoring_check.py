"""A model whose numbers our forward would get wrong is refused when it is loaded, with what to set instead."""

import pytest
import torch
import transformers as hf
from torch import nn

from skyrl_train.errors import ConfigError
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.scoring_check import _FusedAttention, check_scoring
from skyrl_train.models.value_model import load_value_model

CPU = torch.device("cpu")
BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
    initializer_range=0.2,
)


def build(model_class: type, config_class: type, **settings) -> nn.Module:
    torch.manual_seed(0)
    return model_class(config_class(**(BASE | settings))).train()


EXACT = {
    "llama": lambda: build(hf.LlamaForCausalLM, hf.LlamaConfig),
    "untied with a bias": lambda: build(hf.PhiForCausalLM, hf.PhiConfig),
    "windows in all layers": lambda: build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=3),
    "windows in some layers": lambda: build(
        hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, head_dim=8, sliding_window=3, final_logit_softcapping=2.0
    ),
    "windows switched off": lambda: build(hf.Qwen2ForCausalLM, hf.Qwen2Config, sliding_window=3),
    "logits divided": lambda: build(hf.GraniteForCausalLM, hf.GraniteConfig, logits_scaling=4.0),
    "logits multiplied": lambda: build(hf.CohereForCausalLM, hf.CohereConfig, logit_scale=0.25),
    "experts": lambda: build(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=8,
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_exactly_supported_models_pass(name, packing):
    model = EXACT[name]()
    model.set_attn_implementation("sdpa")
    check_scoring(ScoringModel(model, packing=packing, chunk_size=4), name)


def gemma2(**settings):
    return build(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=8, **settings)


def unknown_linear_attention():
    """Build a model of a type whose layers are not computed over packed rows."""
    return build(hf.OlmoHybridForCausalLM, hf.OlmoHybridConfig, num_hidden_layers=4)


@pytest.mark.parametrize(
    "model, problem, advice",
    [
        (lambda: build(hf.BloomForCausalLM, hf.BloomConfig), "cannot be replaced", "trainer.flash_attn=false"),
        (unknown_linear_attention, "linear_attention", "trainer.use_sample_packing=false"),
    ],
)
def test_models_without_packing_error_suggests_fix(model, problem, advice, caplog):
    with pytest.raises(ConfigError, match=rf"^its-name cannot be trained.*{problem}.*Set {advice}\.$"):
        check_scoring(ScoringModel(model()), "its-name")


def falcon(**settings):
    model = build(hf.FalconForCausalLM, hf.FalconConfig, new_decoder_architecture=False, **settings)
    model.config._attn_implementation_internal = "sdpa"  # which falcon reads at each call
    return model


def test_model_with_consistent_attention_functions_passes():
    check_scoring(ScoringModel(falcon(alibi=False), packing=False), "falcon")


@pytest.mark.parametrize("packing, attention", [(True, "sdpa"), (False, "sdpa"), (False, "eager")])
def test_model_with_inconsistent_attention_is_always_rejected(packing, attention, caplog):
    """transformers' falcon adds alibi twice in eager attention and once in sdpa."""
    model = falcon(alibi=True)
    model.config._attn_implementation_internal = attention
    with torch.no_grad():
        ids, both = torch.arange(2, 12)[None], []
        for model.config._attn_implementation_internal in ("sdpa", "eager"):
            both.append(model(ids, use_cache=False).logits.log_softmax(-1))
    assert (both[0] - both[1]).abs().max() > 0.05, "transformers has mended it: take another model for this test"
    model.config._attn_implementation_internal = attention
    with pytest.raises(ConfigError, match=r"No setting changes this"):
        check_scoring(ScoringModel(model, packing=packing), "falcon")
    assert model.config._attn_implementation == attention


class AlwaysFused(hf.LlamaForCausalLM):
    """Runs torch's fused attention whatever its config asks for."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.config = hf.LlamaConfig(**BASE)
            layer.self_attn.config._attn_implementation_internal = "sdpa"


def test_model_with_fused_reference_kernel_is_rejected():
    model = build(AlwaysFused, hf.LlamaConfig)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"trainer.flash_attn=false\.$"):
        check_scoring(ScoringModel(model, packing=False), "fused")
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"calls a fused attention kernel .*eager.*No setting changes this"):
        check_scoring(ScoringModel(model, packing=False), "fused")


def test_extension_kernels_are_detected_as_fused():
    @torch.library.custom_op("skyrl_test::flash_attn_forward", mutates_args=())
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with _FusedAttention() as fused:
        kernel(torch.ones(2)) + torch.ones(2)
    assert fused.calls > 0


def test_undeclared_logit_caps_are_detected():
    model = gemma2()
    check_scoring(ScoringModel(model), "gemma2")
    model.config.attn_logit_softcapping = 1e6
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping=1000000\.0"):
        check_scoring(ScoringModel(model), "gemma2")


def test_logit_caps_on_padded_rows_require_eager_attention():
    model = gemma2()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping=50.0.*Set trainer.flash_attn=false"):
        check_scoring(ScoringModel(model, packing=False), "gemma2")


def test_capped_scores_use_model_attention():
    model = gemma2()
    model.set_attn_implementation("eager")
    check_scoring(ScoringModel(model, packing=False), "gemma2")


class DoubledLogits(hf.LlamaForCausalLM):
    """Does to its logits what no config names."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_unknown_logit_transform_is_always_rejected():
    with pytest.raises(ConfigError, match=r"differ from the model's own forward by .*No setting"):
        check_scoring(ScoringModel(build(DoubledLogits, hf.LlamaConfig)), "doubled")


def test_undeclared_sliding_window_is_detected_with_short_rows():
    model = build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=4096)
    check_scoring(ScoringModel(model), "mistral")
    model.config.sliding_window = None  # the config says one thing; attention layers still read the other
    for layer in model.model.layers:
        layer.self_attn.config = hf.MistralConfig(**BASE, sliding_window=4096)
        layer.self_attn.config._attn_implementation = model.config._attn_implementation
    with pytest.raises(ConfigError, match=r"windows \[None, None, None\]"):
        check_scoring(ScoringModel(model), "mistral")


def test_check_does_not_modify_model(tiny_model: str):
    model = load_causal_lm(tiny_model, device=CPU, gradient_checkpointing=True)
    scoring = ScoringModel(model)
    before = {name: tensor.clone() for name, tensor in scoring.state_dict().items()}
    check_scoring(scoring, "tiny")
    assert scoring.packing and model.config._attn_implementation == "skyrl_packed" and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in scoring.state_dict().items())
    assert all(parameter.grad is None for parameter in scoring.parameters())


@pytest.mark.parametrize("packing", [True, False])
def test_critics_are_checked(tiny_model: str, packing):
    model = load_value_model(tiny_model, device=CPU, packing=packing)
    check_scoring(model, "critic")
    if packing:
        for layer in model.backbone.layers:  # a layer that lets rows see each other
            layer.register_forward_hook(lambda module, args, output: output.roll(1, dims=1))
        with pytest.raises(ConfigError, match="values of random tokens differ"):
            check_scoring(model, "critic")
