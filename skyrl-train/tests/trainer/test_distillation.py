"""On-policy distillation by settings alone: the reference model as teacher, its k1 divergence as the only reward,
advantages of single tokens."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.batch_preparation import prepare_training_batch
from skyrl_train.config import SkyRLConfig
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.workers.worker import RefWorker

NUM_WORDS, NUM_PROMPT, NUM_RESPONSE = 11, 2, 4
NUM_ROWS = 64
TEMPERATURE = 0.7


def distillation_config() -> SkyRLConfig:
    """Return the settings of `examples/on_policy_distillation/run_distillation.sh`."""
    cfg = SkyRLConfig()
    algorithm = cfg.trainer.algorithm
    algorithm.advantage_estimator = "token_reward"
    algorithm.policy_loss_type = "importance_sampling"
    algorithm.use_kl_loss, algorithm.use_kl_in_reward = False, True
    algorithm.kl_estimator_type, algorithm.kl_loss_coef = "k1", 1.0
    cfg.generator.sampling_params.temperature = TEMPERATURE
    return cfg


def model_of(seed: int) -> ScoringModel:
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
    causal_lm.lm_head.weight.data.mul_(20.0)  # far from uniform: student and teacher disagree
    return ScoringModel(causal_lm, packing=False)  # so that the transformer itself can be asked, too


@torch.no_grad()
def next_words(model: ScoringModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [B, T, V] of the next word after each."""
    return (model.causal_lm(ids).logits / TEMPERATURE).log_softmax(dim=-1)


def answers(student: ScoringModel, dice: torch.Generator) -> torch.Tensor:
    """Prompts of random words with the student's continuations. [B, T]"""
    ids = torch.randint(NUM_WORDS, (NUM_ROWS, NUM_PROMPT), generator=dice)
    for _ in range(NUM_RESPONSE):
        drawn = torch.multinomial(next_words(student, ids)[:, -1].exp(), 1, generator=dice)
        ids = torch.cat([ids, drawn], dim=1)
    return ids


def reverse_kl(student: ScoringModel, teacher: ScoringModel, ids: torch.Tensor) -> float:
    """KL(student || teacher) of the next word, over the whole vocabulary, where the student went."""
    own, wanted = (next_words(model, ids)[:, NUM_PROMPT - 1 : -1] for model in (student, teacher))
    return (own.exp() * (own - wanted)).sum(dim=-1).mean().item()


def batch_of(
    ids: torch.Tensor, student: ScoringModel, teacher: ScoringModel, teacher_temperature: float = TEMPERATURE
) -> TrainingInputBatch:
    """Make the trainer's batch before its preparation. No environment gives a reward."""
    ones = torch.ones(NUM_ROWS, NUM_RESPONSE)
    seen = torch.ones_like(ids)
    with torch.no_grad():
        old = student(ids, seen, NUM_RESPONSE, TEMPERATURE).log_probs
        base = teacher(ids, seen, NUM_RESPONSE, teacher_temperature).log_probs
    return TrainingInputBatch(
        sequences=ids,
        attention_mask=seen,
        response_mask=ones.long(),
        loss_mask=ones,
        rewards=torch.zeros_like(ones),
        rollout_logprobs=None,
        action_log_probs=old,
        base_action_log_probs=base,
        metadata={
            "uids": [str(row) for row in range(NUM_ROWS)],
            "valid": [True] * NUM_ROWS,
            "response_length": NUM_RESPONSE,
        },
    )


def distil(seed: int, num_steps: int = 40) -> list[float]:
    """The student's divergence from its teacher, before every step and after the last."""
    cfg = distillation_config()
    student, teacher = model_of(seed), model_of(seed + 100)
    loss_fn = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    dice = torch.Generator().manual_seed(seed)
    divergences = []
    for _ in range(num_steps):
        ids = answers(student, dice)
        divergences.append(reverse_kl(student, teacher, ids))
        batch = batch_of(ids, student, teacher)
        prepared, _ = prepare_training_batch(batch, cfg, kl_coefficient=cfg.trainer.algorithm.kl_loss_coef)
        mask = prepared.tensor("loss_mask")
        log_probs = student(ids, batch.tensor("attention_mask"), NUM_RESPONSE, TEMPERATURE).log_probs
        token_losses, _ = loss_fn(
            log_probs,
            prepared.tensor("action_log_probs"),
            prepared.tensor("advantages"),
            cfg.trainer.algorithm,
            mask,
            None,
        )
        optimizer.zero_grad()
        (token_losses * token_weights(mask, "token_mean")).sum().backward()
        optimizer.step()
    return [*divergences, reverse_kl(student, teacher, answers(student, dice))]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_comes_to_write_as_its_teacher_does(seed):
    divergences = distil(seed)
    assert divergences[0] > 2.0
    assert divergences[-1] < 0.2 * divergences[0]


def test_a_student_that_is_its_teacher_has_nothing_to_learn_under_one_temperature():
    student = model_of(0)
    ids = answers(student, torch.Generator().manual_seed(0))
    for temperature, learns in [(TEMPERATURE, False), (1.0, True)]:
        batch = batch_of(ids, student, copy.deepcopy(student), temperature)
        prepared, metrics = prepare_training_batch(batch, distillation_config(), kl_coefficient=1.0)
        assert bool(prepared.tensor("advantages").any()) is learns
        assert (metrics["loss/avg_kl"] != 0.0) is learns


def test_the_reference_worker_scores_under_the_policys_temperature(tiny_model):
    cfg = distillation_config()
    cfg.trainer.ref.model.path, cfg.trainer.bf16 = tiny_model, False
    ids = torch.arange(2, 2 + 2 * (NUM_PROMPT + NUM_RESPONSE)).view(2, -1)
    worker = RefWorker(cfg)
    try:
        worker.init_model(RankInfo())
        batch = TrainingInputBatch(
            sequences=ids, attention_mask=torch.ones_like(ids), metadata={"response_length": NUM_RESPONSE}
        )
        found = worker.forward(batch, [MicroBatch(rows=(0, 1))]).tensor("output")
    finally:
        worker.teardown()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(ids).logits
    log_probs = (logits / TEMPERATURE).log_softmax(dim=-1)[:, NUM_PROMPT - 1 : -1]
    expected = log_probs.gather(2, ids[:, NUM_PROMPT:, None]).squeeze(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """The expectation is over all tokens of one next-token distribution, each weighted by its probability."""
    torch.manual_seed(0)
    student = torch.randn(NUM_WORDS, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(NUM_WORDS, dtype=torch.float64).log_softmax(dim=-1)
    log_probs = student.log_softmax(dim=-1)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), student)

    every_word = student.log_softmax(dim=-1)[:, None]  # as a batch: one row a word, one token a row
    old, mask = every_word.detach(), torch.ones(NUM_WORDS, 1, dtype=torch.float64)
    rewards = -compute_approx_kl(old, teacher[:, None], mask, "k1")
    advantages, _ = AdvantageEstimatorRegistry.get("token_reward")(token_level_rewards=rewards, response_mask=mask)
    cfg = distillation_config().trainer.algorithm
    losses, _ = PolicyLossRegistry.get("importance_sampling")(every_word, old, advantages, cfg, mask, None)
    (found,) = torch.autograd.grad((old.exp() * losses).sum(), student)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
