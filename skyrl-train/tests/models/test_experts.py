"""Use of experts, counted as transformers counts it."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.experts import RouterStatistics, compute_auxiliary_loss
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.transformers_names import enable_gradient_checkpointing

EXPERTS, CHOSEN = 4, 2


def make_model(kind: str = "qwen3"):
    torch.manual_seed(0)
    settings = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts_per_tok=CHOSEN,
        initializer_range=0.3,
    )
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=EXPERTS))
    # Layer 1 of the three has no router.
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**settings, num_experts=EXPERTS, moe_intermediate_size=16, mlp_only_layers=[1])
    )


def test_two_tokens_and_two_experts_match_manual_result():
    # Both tokens go to expert 0, with probability 3/4 and 1/4 on average: 2 * (1 * 3/4 + 0 * 1/4).
    statistics = RouterStatistics(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.5, 0.5]]), 2)
    assert compute_auxiliary_loss(statistics) == pytest.approx(1.5)
    # As many tokens that do the opposite: evenly used, and the loss of one expert a token is 1.
    opposite = RouterStatistics(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 1.5]]), 2)
    assert compute_auxiliary_loss(statistics + opposite) == pytest.approx(1.0)


def test_router_loss_of_empty_batch_is_zero():
    assert compute_auxiliary_loss(RouterStatistics(torch.zeros(1, 2), torch.zeros(1, 2), 0)) == 0.0


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_router_loss_sums_over_micro_batches_to_full_batch(kind, packing, gradient_checkpointing, ragged):
    model = make_model(kind).train()
    words = torch.where(ragged.mask == 1, ragged.sequences, 0)
    positions = (ragged.mask.cumsum(1) - 1).clamp(min=0)
    logits = model(words, ragged.mask, position_ids=positions, output_router_logits=True).router_logits
    assert len(logits) == (2 if kind == "qwen3" else 3)
    expected = load_balancing_loss_func(logits, EXPERTS, CHOSEN, ragged.mask)
    if gradient_checkpointing:
        enable_gradient_checkpointing(model, use_reentrant=False)
    scoring = ScoringModel(model, packing=packing)
    total: RouterStatistics | None = None
    for rows in ([0, 1], [2], [3, 4, 5]):
        scores = scoring(*ragged.rows(rows), 1.0)
        scores.log_probs.sum().backward()  # which computes the layers again, and must not be counted
        assert scores.router is not None
        total = scores.router if total is None else total + scores.router
    assert total is not None
    assert total.num_tokens == int(ragged.mask.sum())
    assert total.counts.sum() == CHOSEN * len(logits) * total.num_tokens
    assert compute_auxiliary_loss(total) == pytest.approx(expected.item(), rel=1e-5)


def test_packed_moe_scores_match_padded_rows(ragged):
    results = []
    for packing in (True, False):
        model = make_model()
        scores = ScoringModel(model, packing=packing)(*ragged, 1.0)
        scores.log_probs.sum().backward()
        results.append([scores.log_probs, *(parameter.grad for parameter in model.parameters())])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_dense_model_has_no_expert_statistics(tiny_model: str, ragged):
    model = load_causal_lm(tiny_model, device=torch.device("cpu"))
    assert ScoringModel(model)(*ragged, 1.0).router is None
