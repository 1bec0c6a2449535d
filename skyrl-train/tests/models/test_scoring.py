"""A packed, chunked forward gives what the model's own forward gives to each row alone, in numbers and in gradients."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.config import FSDPConfig
from skyrl_train.distributed.process_group import build_mesh
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.errors import ConfigError
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.scoring import ScoringModel, TokenScores
from skyrl_train.models.transformers_names import enable_gradient_checkpointing
from skyrl_train.training_backends.fsdp2.sharding import shard_model
from skyrl_train_testing.invariances import check_model_forward

CPU = torch.device("cpu")
WORDS, TEMPERATURE = 64, 0.7


def make_model(**changes) -> nn.Module:
    settings = dict(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


def gradients_of(scores: TokenScores, model: nn.Module) -> list[torch.Tensor]:
    assert scores.entropy is not None
    weights = torch.randn(2, *scores.log_probs.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (weights[0] * scores.log_probs + weights[1] * scores.entropy).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_batched_scores_and_gradients_match_single_rows(changes):
    check_model_forward(make_model(**changes), scoring=partial(ScoringModel, chunk_size=4))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("lengths", [[(3, 0), (6, 0)], [(0, 0), (0, 0)]], ids=["prompts only", "nothing at all"])
def test_batch_without_responses_gives_zero_scores_and_gradients(packing, lengths, make_batch):
    """Every rank must take part in every backward, whatever its rows are."""
    model = ScoringModel(make_model(), packing=packing)
    ragged = make_batch(lengths)
    scores = model(*ragged, 1.0, with_entropy=True)
    assert not scores.log_probs.any()
    scores.log_probs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("packing", [True, False])
def test_response_without_prompt_has_no_first_token_score(packing, make_batch):
    """Nothing predicts it; in a packed batch the row before it must not."""
    ragged = make_batch([(6, 7), (0, 3)])
    scores = ScoringModel(make_model(), packing=packing)(*ragged, 1.0)
    assert scores.log_probs[1, 0] == 0
    assert (scores.log_probs[1, 1:3] < 0).all()


@pytest.mark.parametrize("packing", [True, False])
def test_no_grad_forward_is_bit_exact_with_training_forward(packing, ragged):
    """Only then is the ratio of the first optimizer step exactly 1."""
    model = make_model()
    enable_gradient_checkpointing(model, use_reentrant=False)
    scoring = ScoringModel(model.train(), packing=packing, chunk_size=4)
    with torch.no_grad():
        old = scoring(*ragged, TEMPERATURE).log_probs
    new = scoring(*ragged, TEMPERATURE, with_entropy=True).log_probs
    assert new.requires_grad and not old.requires_grad
    assert torch.equal(old, new.detach())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["all train", "embeddings frozen"])
def test_activation_checkpointing_preserves_gradients(tiny_model: str, packing, use_reentrant, frozen, ragged):
    gradients = []
    for checkpointing in (False, True):
        model = load_causal_lm(
            tiny_model, device=CPU, gradient_checkpointing=checkpointing, use_reentrant=use_reentrant
        )
        if frozen:
            model.get_input_embeddings().weight.requires_grad_(False)
        scoring = ScoringModel(model, packing=packing)
        gradients.append(gradients_of(scoring(*ragged, 1.0, with_entropy=True), model))
    assert_close(gradients[1], gradients[0])
    assert any(gradient.any() for gradient in gradients[0])


def test_full_logits_and_full_mask_are_never_allocated(watch_tensors):
    """32 rows of 64 tokens: N = 2,048; logits would have N V = 4 million elements, a mask N N as many."""
    words, num_tokens = 2000, 32 * 64
    model = ScoringModel(make_model(vocab_size=words, hidden_size=16), chunk_size=64)
    sequences, mask = torch.randint(words, (32, 64)), torch.ones(32, 64)
    with watch_tensors() as made:
        model(sequences, mask, 48, 1.0, with_entropy=True).log_probs.sum().backward()
    assert made.largest <= num_tokens * 64  # the width of the MLP
    assert made.largest < num_tokens * words // 16


@pytest.mark.first_case
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp_gathers_output_layer_for_forward_and_backward(
    tiny_model: str, group_of_one: None, packing, gradient_checkpointing, reshard, ragged
):
    """The chunks of the backward use the weight again, after FSDP has freed and regathered it."""
    results = {}
    for how in ("plain", "float32", "bfloat16"):
        model = load_causal_lm(tiny_model, device=CPU, gradient_checkpointing=gradient_checkpointing)
        scoring = ScoringModel(model, packing=packing, chunk_size=5)
        if how != "plain":
            config = FSDPConfig(reshard_after_forward=reshard)
            shard_model(scoring, build_mesh(CPU), config, bf16=how == "bfloat16")
        scores = scoring(*ragged, TEMPERATURE, with_entropy=True)
        scores.log_probs.sum().backward()
        assert scores.log_probs.dtype == torch.float32
        gradients = {name: gather_full_tensor(parameter.grad) for name, parameter in scoring.named_parameters()}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        results[how] = scores.log_probs.detach(), gradients
    assert torch.equal(results["plain"][0], results["float32"][0])
    assert_close(list(results["float32"][1].values()), list(results["plain"][1].values()))
    assert not torch.equal(results["plain"][0], results["bfloat16"][0])
    assert (results["plain"][0] - results["bfloat16"][0]).abs().max() < 0.2


def test_parameter_names_match_transformers(tiny_model: str):
    model = load_causal_lm(tiny_model, device=CPU)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in ScoringModel(model).named_parameters()] == [f"causal_lm.{name}" for name in names]


def test_nonlinear_output_layer_is_rejected(tiny_model: str):
    model = load_causal_lm(tiny_model, device=CPU)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match=r"lora\.target_modules"):
        ScoringModel(model)


def test_saved_model_omits_custom_attention_name(tiny_model: str, tmp_path):
    model = load_causal_lm(tiny_model, device=CPU)
    ScoringModel(model).causal_lm.save_pretrained(tmp_path)
    assert "skyrl" not in (tmp_path / "config.json").read_text()
