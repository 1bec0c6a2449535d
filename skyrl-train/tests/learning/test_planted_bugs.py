"""Ten classical faults, each planted into the real code at one place, and the check that it cannot get past.

Most are caught by a number and not by learning: a policy learns in spite of a good many faults, only worse.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from skyrl_train.algorithms import advantages, reduction
from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.training_backends.base import Scores
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train.workers.objectives import policy as policy_objective
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing import learning
from skyrl_train_testing.invariances import check_advantage_estimator, check_kl_estimator, check_reduction
from skyrl_train_testing.learning import Apprentice, learn
from skyrl_train_testing.tasks import Bandit, CreditOverTurns, ToolUse

# ---- checks, each true of the code as it is


def the_bandit_is_learnt() -> None:
    assert learn(Bandit(), num_steps=10, learning_rate=1.5e-2).after > 0.7


def credit_goes_to_the_turn_that_earned_it() -> None:
    assert learn(CreditOverTurns(), {"advantage_estimator": "token_reward"}, num_steps=14).after > 1.5


def grpo_keeps_the_invariances() -> None:
    check_advantage_estimator(AdvantageEstimatorRegistry.get("grpo"))


def the_reduction_keeps_the_invariances() -> None:
    check_reduction(partial(reduction.token_weights, reduction="sequence_mean"))


def kl_keeps_the_invariances() -> None:
    check_kl_estimator(policy_objective.compute_approx_kl)


def the_first_ratio_of_every_step_is_exactly_1() -> None:
    apprentice = Apprentice(ToolUse())
    assert [apprentice.step()["max/ratio_deviation"] for _ in range(3)] == [0.0, 0.0, 0.0]


def sampler_and_trainer_give_tokens_the_same_log_probs() -> None:
    colder = {"generator": {"sampling_params": {"temperature": 0.6}}}
    apprentice = Apprentice(ToolUse(), settings=colder)
    for _ in range(2):
        assert apprentice.step()["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5


def the_kl_term_alone_moves_the_policy() -> None:
    apprentice = Apprentice(Bandit(), {"use_kl_loss": True, "kl_loss_coef": 1.0})
    apprentice.step()  # at first it is the reference, from which nothing pulls
    assert gradient_norm(apprentice, advantage=0.0) > 0.01


def the_same_batch_gives_the_same_gradient_twice() -> None:
    apprentice = Apprentice(Bandit(), learning_rate=0.0)
    batch = judged_batch(apprentice)
    first, second = gradient_norm(apprentice, batch=batch), gradient_norm(apprentice, batch=batch)
    assert first > 0.01
    assert second == first


def a_group_of_one_has_no_baseline() -> None:
    one = torch.ones(1, 1)
    given: dict[str, Any] = dict(token_level_rewards=0.7 * one, response_mask=one, index=["alone"])
    scores = {name: AdvantageEstimatorRegistry.get(name)(**given)[0].item() for name in ("grpo", "rloo")}
    assert scores == {"grpo": pytest.approx(0.7, abs=1e-5), "rloo": 0.0}


def judged_batch(apprentice: Apprentice) -> Any:
    """A batch with all that the policy is given."""
    episodes, names = apprentice.rollouts(8)
    batch = apprentice.batch_of(episodes, names)
    batch = apprentice.with_forwards(batch, apprentice.schedule(batch, [list(range(len(batch)))]))
    draw = torch.Generator().manual_seed(0)
    batch["advantages"] = torch.randn(batch.tensor("rewards").shape, generator=draw)
    batch["loss_weights"] = batch.tensor("loss_mask") / batch.tensor("loss_mask").sum()
    return batch


def gradient_norm(apprentice: Apprentice, *, advantage: float = 1.0, batch: Any = None) -> float:
    """Take one optimizer step with advantages scaled by a factor."""
    batch = judged_batch(apprentice) if batch is None else batch
    batch["advantages"] = batch["advantages"] * advantage
    schedule = apprentice.schedule(batch, [list(range(len(batch)))])
    apprentice.policy.load_batch(schedule.split(batch)[0])
    apprentice.policy.forward_backward(schedule.mini_batches[0][0])
    return apprentice.policy.optim_step()["grad_norm"]


# ---- faults


def sign_of_the_advantage(plant: pytest.MonkeyPatch) -> None:
    registration = AdvantageEstimatorRegistry.get_registration("grpo")
    right = registration.entry

    def turned_round(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, returns = right(**given)
        return -values, returns

    plant.setitem(AdvantageEstimatorRegistry._registrations, "grpo", replace(registration, entry=turned_round))


def shifted(output: int, by: int, plant: pytest.MonkeyPatch) -> None:
    """Shift one output of the conversion of answers to tensors."""
    right = learning.convert_prompts_responses_to_batch_tensors

    def convert(*given: Any) -> Any:
        tensors = list(right(*given))
        tensors[output] = tensors[output].roll(by, dims=1)
        return tensors

    plant.setattr(learning, "convert_prompts_responses_to_batch_tensors", convert)


def reward_on_the_token_before(plant: pytest.MonkeyPatch) -> None:
    shifted(3, -1, plant)


def mask_shifted_by_one(plant: pytest.MonkeyPatch) -> None:
    shifted(4, 1, plant)


def stale_old_log_probs(plant: pytest.MonkeyPatch) -> None:
    """Those of the policy as it was a step ago."""
    right = PolicyWorker.forward

    def stale(worker: Any, *given: Any) -> Any:
        now = {name: tensor.clone() for name, tensor in worker.backend.model.state_dict().items()}
        worker.backend.model.load_state_dict(getattr(worker, "before", now))
        output = right(worker, *given)
        worker.backend.model.load_state_dict(now)
        worker.before = now
        return output

    plant.setattr(PolicyWorker, "forward", stale)


def std_of_the_batch(plant: pytest.MonkeyPatch) -> None:
    right = advantages._compute_group_stds

    def of_the_batch(centred_B: torch.Tensor, group_B: Any, counts_B: Any, size_G: torch.Tensor) -> torch.Tensor:
        assert right(centred_B, group_B, counts_B, size_G).shape == size_G.shape
        return centred_B.std().expand_as(size_G)

    plant.setattr(advantages, "_compute_group_stds", of_the_batch)


def kl_without_gradient(plant: pytest.MonkeyPatch) -> None:
    right = policy_objective.compute_approx_kl
    plant.setattr(policy_objective, "compute_approx_kl", lambda *given: right(*given).detach())


def temperature_forgotten(plant: pytest.MonkeyPatch) -> None:
    """Plant the fault in the backend: a model with it is found when it is loaded."""

    def forgetful(backend: Any, micro: Any, *, with_entropy: bool = False) -> Scores:
        inputs = micro.tensor("sequences"), micro.tensor("attention_mask"), micro.metadata["response_length"]
        scores = backend.model(*inputs, 1.0, with_entropy=with_entropy)
        return Scores(scores.log_probs, scores.entropy)

    plant.setattr(FSDP2Backend, "score", forgetful)


def mean_over_the_padded_width(plant: pytest.MonkeyPatch) -> None:
    def padded(loss_mask: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return loss_mask.float() / loss_mask.numel()

    plant.setattr(reduction, "token_weights", padded)


def missing_zero_grad(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(torch.optim.AdamW, "zero_grad", lambda optimizer: None)


def own_score_as_baseline_of_a_group_of_one(plant: pytest.MonkeyPatch) -> None:
    right = advantages.compute_group_means

    def never_alone(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean_G, size_G = right(*given)
        return mean_G, size_G.clamp(min=2)

    plant.setattr(advantages, "compute_group_means", never_alone)


Check = Callable[[], None]
Fault = Callable[[pytest.MonkeyPatch], None]

FAULTS: list[tuple[Fault, list[Check]]] = [
    (sign_of_the_advantage, [the_bandit_is_learnt, grpo_keeps_the_invariances]),
    (mask_shifted_by_one, [sampler_and_trainer_give_tokens_the_same_log_probs]),
    (stale_old_log_probs, [the_first_ratio_of_every_step_is_exactly_1]),
    (std_of_the_batch, [grpo_keeps_the_invariances]),
    (kl_without_gradient, [the_kl_term_alone_moves_the_policy, kl_keeps_the_invariances]),
    (reward_on_the_token_before, [credit_goes_to_the_turn_that_earned_it]),
    (temperature_forgotten, [sampler_and_trainer_give_tokens_the_same_log_probs]),
    (mean_over_the_padded_width, [the_reduction_keeps_the_invariances]),
    (missing_zero_grad, [the_same_batch_gives_the_same_gradient_twice]),
    (own_score_as_baseline_of_a_group_of_one, [a_group_of_one_has_no_baseline]),
]
CHECKS = list(dict.fromkeys(check for _, checks in FAULTS for check in checks))


@pytest.mark.first_case
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_unmodified_code_passes(check: Check):
    check()


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("fault", "check"),
    [(fault, check) for fault, checks in FAULTS for check in checks],
    ids=lambda function: function.__name__,
)
def test_injected_fault_is_detected(fault: Fault, check: Check, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_number_of_planted_bugs_is_ten():
    assert len(FAULTS) == 10


@pytest.mark.parametrize(
    ("terms", "advantage"),
    [
        ({}, 1.0),
        ({"use_kl_loss": True, "kl_loss_coef": 1.0}, 0.0),
        ({"use_entropy_loss": True, "entropy_loss_coef": 1.0}, 0.0),
    ],
    ids=["policy", "kl", "entropy"],
)
def test_loss_terms_have_distinct_gradients(terms: dict[str, Any], advantage: float):
    apprentice = Apprentice(Bandit(), terms)
    apprentice.step()  # away from the reference
    assert gradient_norm(apprentice, advantage=advantage) > 0.01


def test_loss_without_terms_has_no_gradient():
    apprentice = Apprentice(Bandit(), {"use_entropy_loss": True, "entropy_loss_coef": 0.0})
    apprentice.step()
    assert gradient_norm(apprentice, advantage=0.0) == 0.0
