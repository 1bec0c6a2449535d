"""bfloat16 is how it computes, not what it is: parameters, gradients and log-probs are float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from skyrl_train.config import FSDPConfig
from skyrl_train.distributed.process_group import build_mesh
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.errors import ConfigError
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.weight_files import find_float32_modules
from skyrl_train.training_backends.fsdp2.sharding import shard_model
from skyrl_train_testing.architectures import ARCHITECTURES

CPU = torch.device("cpu")


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_bfloat16_log_probs_and_gradient_are_near_float32(
    tiny_model: str, group_of_one: None, gradient_checkpointing: bool
):
    ids = torch.randint(2, 64, (3, 10), generator=torch.Generator().manual_seed(0))
    log_probs, norms = {}, {}
    for bf16 in (False, True):
        transformer = load_causal_lm(tiny_model, device=CPU, gradient_checkpointing=gradient_checkpointing)
        model = shard_model(ScoringModel(transformer), build_mesh(CPU), FSDPConfig(), bf16=bf16)
        log_probs[bf16] = model(ids, torch.ones_like(ids), 4, 1.0).log_probs
        log_probs[bf16].sum().backward()
        gradients = [
            gather_full_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
        ]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        norms[bf16] = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    assert log_probs[True].dtype == torch.float32
    assert not torch.equal(log_probs[True], log_probs[False])
    assert (log_probs[True] - log_probs[False]).abs().max() < 0.2
    assert norms[True] == pytest.approx(norms[False], rel=0.15)


def rows_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 24 rows of 10 to 33 tokens, [24, 33] and their mask."""
    ids = torch.randint(3, 99, (24, 33), generator=torch.Generator().manual_seed(4))
    return ids, (torch.arange(33) < torch.arange(10, 34)[:, None]).long()


def sharded_log_probs(folder: str, *, bf16: bool) -> torch.Tensor:
    """Return log-probs [24, 32] of one FSDP2 rank, 0 at padding."""
    ids, mask = rows_and_mask()
    model = shard_model(ScoringModel(load_causal_lm(folder, device=CPU)), build_mesh(CPU), FSDPConfig(), bf16=bf16)
    return model(ids, mask, 32, 1.0).log_probs


def own_log_probs(folder: str) -> torch.Tensor:
    """Return log-probs [24, 32] of transformers' own forward in bfloat16, each row alone, 0 at padding."""
    ids, mask = rows_and_mask()
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        model.set_experts_implementation("eager")
    log_probs = torch.zeros(24, 32)
    for row, length in enumerate(mask.sum(1).tolist()):
        logits = model(ids[row : row + 1, :length], use_cache=False).logits[0, :-1].float()
        log_probs[row, : length - 1] = logits.log_softmax(-1).gather(1, ids[row, 1:length, None])[:, 0]
    return log_probs


DAILY = {"gpt_oss", "deepseek_v3"}
EACH = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", EACH)
@torch.no_grad()
def test_bfloat16_error_is_at_most_transformers_error(name: str, folder_of: Any, group_of_one: None):
    """Routers choose other experts for a few tokens in a hundred in bfloat16, there as here: hidden states are rounded
    before them."""
    exact, own = sharded_log_probs(folder_of(name), bf16=False), own_log_probs(folder_of(name))
    ours = sharded_log_probs(folder_of(name), bf16=True)
    assert 0 < (ours - exact).abs().mean() < 1.5 * (own - exact).abs().mean()
    # And it is to the bit what a model whose weights are bfloat16 gives in the same layout.
    ids, mask = rows_and_mask()
    rounded = hf.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.bfloat16)
    assert torch.equal(ours, ScoringModel(rounded)(ids, mask, 32, 1.0).log_probs.float())


@torch.no_grad()
def test_routers_kept_in_float32_by_transformers_stay_float32(tmp_path: Path, group_of_one: None):
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, head_dim=8
    )
    experts: dict[str, Any] = dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0)
    config = hf.Ernie4_5_MoeConfig(**sizes, **experts, vocab_size=99, initializer_range=0.2)
    hf.Ernie4_5_MoeForCausalLM(config).save_pretrained(tmp_path)
    rounded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert len(find_float32_modules(rounded, torch.bfloat16)) == 2
    ids, mask = rows_and_mask()
    expected = ScoringModel(rounded)(ids, mask, 32, 1.0).log_probs.float()
    assert torch.equal(sharded_log_probs(str(tmp_path), bf16=True), expected)


def test_custom_parameters_kept_in_float32_stay_float32(folder_of: Any, group_of_one: None):
    """The sinks of gpt-oss are parameters of the attention itself, beside linear layers that are cast."""
    ids, mask = rows_and_mask()
    exact = load_causal_lm(folder_of("gpt_oss"), device=CPU)
    rounded = hf.AutoModelForCausalLM.from_pretrained(folder_of("gpt_oss"), dtype=torch.bfloat16)
    for name, parameter in exact.named_parameters():
        if name.endswith(".sinks"):
            rounded.get_parameter(name).data = parameter.detach().clone()
    exact._keep_in_fp32_modules_strict = {"sinks"}
    model = shard_model(ScoringModel(exact), build_mesh(CPU), FSDPConfig(), bf16=True)
    output = model(ids, mask, 32, 1.0).log_probs
    assert torch.equal(output, ScoringModel(rounded)(ids, mask, 32, 1.0).log_probs.float())
    output.sum().backward()
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name


@pytest.mark.parametrize(
    "kept, says",
    [
        ("gate_up_proj_bias", r"loads model.layers.0.mlp.experts.gate_up_proj_bias in float32, but not .*down_proj, "),
        ("scale", r"model.scale in float32 in the module model \(GptOssModel\) outside the transformer blocks"),
    ],
)
def test_parameters_with_unsupported_float32_mix_are_refused_by_name(
    kept: str, says: str, folder_of: Any, group_of_one: None
):
    exact = load_causal_lm(folder_of("gpt_oss"), device=CPU)
    exact.model.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    exact._keep_in_fp32_modules_strict = {kept}
    with pytest.raises(ConfigError, match=says + ".*trainer.bf16=false"):
        shard_model(ScoringModel(exact), build_mesh(CPU), FSDPConfig(), bf16=True)
