"""Tiny models of each architecture in the table: training's log-probs and gradients are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from skyrl_train.config import LoRAConfig, SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.errors import ConfigError
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.lora import add_adapters, find_adapters, gather_exported_parameters
from skyrl_train.models.scoring import ScoringModel, set_attention
from skyrl_train.models.scoring_check import check_scoring
from skyrl_train_testing.architectures import ARCHITECTURES, page

CPU = torch.device("cpu")
TEMPERATURE = 0.7
LENGTHS = ((20, 6), (20, 3), (3, 40), (1, 9), (35, 2), (4, 5))
"""Prompt and response tokens of each row; the first two have one prompt. Longer than the windows of the table (7)."""
DAILY = {"gemma2", "gemma3_images", "gpt_oss", "deepseek_v3", "qwen3_5_moe"}
EACH = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in ARCHITECTURES]


def make_batch() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return sequences, mask, and the number of response columns; prompts are padded on the left."""
    num_prompt, num_response = (max(each) for each in zip(*LENGTHS, strict=True))
    shape = len(LENGTHS), num_prompt + num_response
    sequences = torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(1))
    sequences[1, :num_prompt] = sequences[0, :num_prompt]
    columns, lengths = torch.arange(shape[1]), torch.tensor(LENGTHS)
    mask = (columns >= num_prompt - lengths[:, :1]) & (columns < num_prompt + lengths[:, 1:])
    return sequences, mask.long(), num_response


def reference(model: Any) -> torch.Tensor:
    """Return log-probs [B, R] by the model's own forward of each row alone, with attention and experts written out."""
    sequences, mask, num_response = make_batch()
    model.set_attn_implementation("eager")
    if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        model.set_experts_implementation("eager")
    expected = torch.zeros(len(LENGTHS), num_response)
    for row, (num_prompt, length) in enumerate(LENGTHS):
        ids = sequences[row][mask[row].bool()]
        log_probs = (model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected[row, :length] = log_probs.gather(1, ids[1:, None])[num_prompt - 1 :, 0]
    return expected


def gradients_of(log_probs: torch.Tensor, model: Any, first: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss in which each token has a weight of its own; `first` is the batch's row."""
    weights = torch.randn(len(LENGTHS), log_probs.shape[1], generator=torch.Generator().manual_seed(2))
    (weights[first : first + len(log_probs)] * log_probs).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = max(1.0, gradient.abs().max().item())
        # Padding moves the chunks of linear attention, whose decays sum up many tokens.
        atol = scale * (1e-4 if "linear_attn" in name else 1e-5)
        torch.testing.assert_close(ours[name], gradient, atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.first_case
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", EACH)
def test_log_probs_and_gradients_match_transformers_in_all_layouts(name, packing, folder_of):
    whole = hf.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    expected = reference(whole)
    gradients = gradients_of(expected, whole)
    inner = load_causal_lm(folder_of(name), device=CPU, gradient_checkpointing=True)
    model = ScoringModel(inner, packing=packing, chunk_size=32, share_prefixes=True)
    check_scoring(model, name)
    assert model.share_prefixes == ARCHITECTURES[name].shares_prefixes
    sequences, mask, num_response = make_batch()
    scores = model(sequences, mask, num_response, TEMPERATURE)
    torch.testing.assert_close(scores.log_probs, expected.detach(), atol=1e-5, rtol=1e-5)
    assert_close(gradients_of(scores.log_probs, inner), gradients)
    inner.zero_grad()
    for rows in (slice(0, 4), slice(4, 6)):  # micro-batches
        part = model(sequences[rows], mask[rows], num_response, TEMPERATURE).log_probs
        torch.testing.assert_close(part, expected.detach()[rows], atol=1e-5, rtol=1e-5)
        summed = gradients_of(part, inner, rows.start)
    assert_close(summed, gradients)


@pytest.mark.first_case
@pytest.mark.parametrize("name", EACH)
def test_adapters_target_listed_layers_and_merge_exactly(name, folder_of):
    inner = load_causal_lm(folder_of(name), device=CPU)
    add_adapters(inner, LoRAConfig(rank=2, alpha=4))
    layers = {adapter.layer for adapter in find_adapters(inner)}
    assert not [layer for layer in layers if "vision" in layer or "visual" in layer]
    of_attention = {layer for layer in layers if "attn" in layer}
    of_mlp = {layer for layer in layers if ".mlp." in layer and not layer.endswith("shared_expert_gate")}
    assert of_attention and all("shared_expert_gate" in layer for layer in layers - of_attention - of_mlp)
    assert bool(of_mlp) == ARCHITECTURES[name].adapters.startswith("attention, MLP")
    for adapter in find_adapters(inner):
        torch.nn.init.normal_(adapter.b, std=0.2)
    sequences, mask, num_response = make_batch()
    model = ScoringModel(inner, chunk_size=32)
    log_probs = model(sequences, mask, num_response, TEMPERATURE).log_probs
    log_probs.sum().backward()
    assert all(adapter.a.grad is not None and adapter.a.grad.any() for adapter in find_adapters(inner))
    merged = hf.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    before = reference(merged).detach()
    merged.load_state_dict(dict(gather_exported_parameters(inner)), strict=False)
    expected = reference(merged).detach()
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(log_probs.detach(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed", "megatron"])
def test_backends_accept_listed_models_and_reject_others(strategy):
    check, policy = TrainingBackendRegistry.get_requirements(strategy).check_model_config, SkyRLConfig().trainer.policy
    for architecture in ARCHITECTURES.values():
        config = architecture.make_config()
        if strategy != "megatron" or architecture.megatron:
            check(config, policy, "trainer.policy")
        else:
            with pytest.raises(ConfigError, match=f"model_type='{config.model_type}'.*trainer.strategy=fsdp2"):
                check(config, policy, "trainer.policy")


def test_quantized_weights_error_suggests_fix(tmp_path: Path):
    config = hf.GptOssConfig(quantization_config={"quant_method": "mxfp4"})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"mxfp4.*Mxfp4Config"):
        load_causal_lm(str(tmp_path), device=CPU)


def test_documented_table_matches_tests():
    """`python -m skyrl_train_testing.architectures > docs/models.md` makes it anew."""
    assert (Path(__file__).parents[3] / "docs" / "models.md").read_text() == page()


class _TwoRanks:
    size, rank = 2, 0

    def check_heads(self, num_heads: int) -> None: ...


def test_linear_attention_rejects_sequence_parallelism():
    with pytest.raises(ConfigError, match="sequence_parallel_size=2"):
        set_attention(ARCHITECTURES["qwen3_5"].build(), True, _TwoRanks())  # pyright: ignore[reportArgumentType]
