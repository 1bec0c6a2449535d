"""Every variant of on-policy distillation: its gradient is that of a dense KL divergence written by hand in float64."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.algorithms.distillation import compute_candidate_kl, compute_teacher_advantages
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.config import AlgorithmConfig
from skyrl_train.config.distillation import DistillationConfig
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.token_log_probs import LogitRule, compute_candidate_log_probs, compute_top_log_probs
from skyrl_train.training_backends.base import Scores
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.workers.objectives.policy import PolicyObjective

NUM_WORDS, NUM_ROWS, NUM_PROMPT, NUM_RESPONSE = 11, 3, 2, 4
TEMPERATURE, COEF = 0.7, 0.3
VARIANTS = pytest.mark.parametrize(
    ("tokens", "top_k", "kl"),
    [
        (tokens, k, kl)
        for kl in ("reverse", "forward")
        for tokens, k in (("top_k", 1), ("top_k", 4), ("full", NUM_WORDS))
    ],
)


def model_of(seed: int) -> ScoringModel:
    """A model in float64 whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=NUM_WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=16,
    )
    causal_lm = Qwen3ForCausalLM(config)
    causal_lm.lm_head.weight.data.mul_(20.0)
    return ScoringModel(causal_lm.double(), packing=False, chunk_size=5)


def dense_log_probs(model: ScoringModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [B, R, V] of the token at each response token, from whole logits of the transformers model."""
    logits = model.causal_lm(ids).logits[:, NUM_PROMPT - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(dim=-1)


def dense_kl(student: torch.Tensor, teacher: torch.Tensor, kl: str, groups: torch.Tensor) -> torch.Tensor:
    """KL divergence [B, R] of two whole distributions, after adding up the tokens of each group.

    Args:
        student, teacher: [B, R, V] log-probs.
        groups: [B, R, G, V], 1 where a token belongs to a group.
    """
    s, t = ((groups * each.exp()[:, :, None]).sum(dim=-1) for each in (student, teacher))
    p, q = (s, t) if kl == "reverse" else (t, s)
    return (p * (p.log() - q.log())).sum(dim=-1)


def groups_of(teacher: torch.Tensor, tokens: str, top_k: int) -> torch.Tensor:
    """The outcomes that a variant tells apart: each token, or the teacher's likeliest and one of all others."""
    single = torch.eye(NUM_WORDS, dtype=torch.float64)
    if tokens == "full":
        return single.expand(*teacher.shape[:2], -1, -1)
    likeliest = single[teacher.argsort(dim=-1, descending=True)[:, :, :top_k]]
    return torch.cat([likeliest, 1 - likeliest.sum(dim=2, keepdim=True)], dim=2)


@VARIANTS
def test_objective_gradient_matches_dense_divergence(tokens, top_k, kl):
    """The path covers the teacher's most likely tokens, the chunked output head and the gradient of every weight."""
    student, teacher = model_of(0), model_of(1)
    ids = torch.randint(NUM_WORDS, (NUM_ROWS, NUM_PROMPT + NUM_RESPONSE), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(NUM_ROWS, NUM_RESPONSE, dtype=torch.float64)
    mask[0, 1:3] = mask[2, 3] = 0  # an observation, and padding
    weights = mask / mask.sum()
    top = teacher(ids, torch.ones_like(ids), NUM_RESPONSE, TEMPERATURE, num_top=top_k).top
    assert top is not None
    scores = student(ids, torch.ones_like(ids), NUM_RESPONSE, TEMPERATURE, with_entropy=True, candidates=top[0].int())
    batch = TrainingInputBatch(
        loss_mask=mask, loss_weights=weights, advantages=torch.zeros_like(mask), teacher_log_probs=top[1]
    )
    settings = DistillationConfig(tokens=tokens, top_k=top_k, kl=kl, coef=COEF)
    objective = PolicyObjective(AlgorithmConfig(), PolicyLossRegistry.get("importance_sampling"), settings)
    loss, sums = objective(Scores(scores.log_probs, scores.entropy, candidates=scores.candidates), batch)
    parameters = list(student.parameters())
    found = torch.autograd.grad(loss, parameters)

    with torch.no_grad():
        of_teacher = dense_log_probs(teacher, ids)
    divergence = dense_kl(dense_log_probs(student, ids), of_teacher, kl, groups_of(of_teacher, tokens, top_k))
    expected = torch.autograd.grad(COEF * (divergence * weights).sum(), parameters)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-11)
    assert max(float(gradient.abs().max()) for gradient in found) > 1e-3
    assert sums["token/teacher_kl"] == pytest.approx(float((divergence.detach() * mask).sum()), rel=1e-9)


def test_expected_sampled_gradient_matches_reverse_kl():
    """The expectation is over all tokens of one next-token distribution, each weighted by its probability."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, NUM_WORDS, dtype=torch.float64, generator=generator)
    student.requires_grad_()
    teacher = teacher.log_softmax(dim=-1)
    log_probs = student.log_softmax(dim=-1)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), student)

    every_word = student.log_softmax(dim=-1)[:, None]  # as a batch: one row a token, one token a row
    old, mask = every_word.detach(), torch.ones(NUM_WORDS, 1, dtype=torch.float64)
    advantages = compute_teacher_advantages(old, teacher[:, None])
    losses, _ = PolicyLossRegistry.get("importance_sampling")(
        every_word, old, advantages, AlgorithmConfig(), mask, None
    )
    (found,) = torch.autograd.grad((old.exp() * losses).sum(), student)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        # student 1/2 1/4 1/4, teacher 1/4 1/4 1/2; the first token, and the others together: 1/2 1/2 and 1/4 3/4
        ("reverse", 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ("forward", 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
    ],
)
def test_divergence_with_tail_matches_manual_result(kl, expected):
    student, teacher = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert compute_candidate_kl(student, teacher, kl, with_tail=True).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_top_k_sum_without_tail_rewards_leaving_teacher_support(kl):
    """The rest is why a student that puts nothing on the teacher's tokens pays for it."""
    teacher = torch.tensor([[0.6, 0.3]]).log()
    student = torch.tensor([[1e-3, 1e-3]]).log()
    assert compute_candidate_kl(student, teacher, kl, with_tail=True).item() > 1.5
    if kl == "reverse":
        assert compute_candidate_kl(student, teacher, kl, with_tail=False).item() < 0


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize("with_tail", [False, True])
def test_excluded_tokens_and_deterministic_teacher_give_finite_gradients(kl, with_tail):
    student = torch.tensor([[8.0, -40.0, 1.0], [90.0, 0.0, -90.0]], requires_grad=True)
    teacher = torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]).log()
    divergence = compute_candidate_kl(student.log_softmax(dim=-1), teacher, kl, with_tail=with_tail)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert divergence.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(multiplier=3.0, softcap=1.5)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunked_head_gradients_match_finite_differences(rule, with_entropy):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 6), (NUM_WORDS, 6), (NUM_WORDS,))
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes
    )
    labels = torch.randint(NUM_WORDS, (5,), generator=generator)
    candidates = torch.stack([torch.randperm(NUM_WORDS, generator=generator)[:3] for _ in range(5)]).int()

    def scores(hidden, weight, bias):
        log_probs, entropy, of_candidates = compute_candidate_log_probs(
            hidden,
            weight,
            labels,
            candidates,
            bias=bias,
            temperature=1.3,
            rule=rule,
            chunk_size=2,
            with_entropy=with_entropy,
        )
        return tuple(each for each in (log_probs, of_candidates, entropy) if each is not None)

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


def test_chunked_head_top_k_matches_full_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 6, generator=generator), torch.randn(NUM_WORDS, 6, generator=generator)
    ids, log_probs = compute_top_log_probs(hidden, weight, 4, temperature=TEMPERATURE, chunk_size=3)
    expected = (hidden @ weight.t() / TEMPERATURE).log_softmax(dim=-1).topk(4)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(log_probs, expected.values, rtol=1e-5, atol=1e-5)
