"""Every algorithm learns what can be learnt: tiny tasks, a known optimum, three seeds.

A corridor is a share of the way from random answers (0) to the optimum (1). Policies that learn are near 0.9 and above;
one that does not is near 0, and one whose gradient has the wrong sign is below.
"""

from typing import Any

import pytest

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train_testing.learning import Apprentice, Episode, learn
from skyrl_train_testing.tasks import Bandit, Copy, CreditOverTurns, Sort, Task, ToolUse

ESTIMATORS = AdvantageEstimatorRegistry.list_available()
LOSSES = [name for name in PolicyLossRegistry.list_available() if PolicyLossRegistry.get_requirements(name).advantages]
DAILY = {"gae", "grpo", "turn_grpo", "clip_cov", "cispo", "dppo", "gspo"}
"""One of each kind: with a critic, with a group's mean, by turn; selecting tokens, without clipping, by divergence, by
sequence. Values and gradients of all are tested daily elsewhere."""
SEEDS = (0, 1, 2)
OTHER_SEEDS = [pytest.param(seed, marks=pytest.mark.full) for seed in SEEDS[1:]]


def slow_beyond_daily(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in names]


def share_of_the_way(task: Task, reward: float) -> float:
    return (reward - task.at_random) / (task.optimum - task.at_random)


def learns(task: Task, corridor: float, *, seed: int, num_steps: int, learning_rate: float = 1e-2, **algorithm: Any):
    if algorithm["advantage_estimator"] == "gae":  # the critic learns, too: it begins with values of the size of 1
        algorithm["value_clip"], num_steps = 1.0, num_steps * 2
    outcome = learn(task, algorithm, seed=seed, num_steps=num_steps, learning_rate=learning_rate)
    before, after = (share_of_the_way(task, reward) for reward in (outcome.before, outcome.after))
    assert abs(before) < 0.1, "it began as a policy that answers at random"
    assert corridor < after <= 1, (algorithm, seed, before, after)


def learns_the_bandit(estimator: str, loss: str, seed: int) -> None:
    algorithm: dict[str, Any] = dict(advantage_estimator=estimator, policy_loss_type=loss)
    learns(Bandit(), 0.7, seed=seed, num_steps=10, learning_rate=1.5e-2, **algorithm)


@pytest.mark.first_case
@pytest.mark.parametrize("estimator", slow_beyond_daily(ESTIMATORS))
def test_estimator_learns_bandit(estimator: str):
    learns_the_bandit(estimator, "regular", seed=0)


@pytest.mark.first_case
@pytest.mark.parametrize("loss", slow_beyond_daily([loss for loss in LOSSES if loss != "regular"]))
def test_loss_learns_bandit(loss: str):
    learns_the_bandit("grpo", loss, seed=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.full), *OTHER_SEEDS])
def test_estimator_and_loss_learn_bandit(estimator: str, loss: str, seed: int):
    learns_the_bandit(estimator, loss, seed)


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("seed", [SEEDS[0], *OTHER_SEEDS])
@pytest.mark.parametrize(
    ("task", "estimator", "loss", "corridor", "num_steps"),
    [
        (Copy(), "grpo", "regular", 0.9, 24),
        (Copy(), "reinforce++_baseline", "cispo", 0.8, 24),
        (Sort(), "rloo", "gspo", 0.8, 24),
        (ToolUse(), "grpo", "regular", 0.7, 30),
        (ToolUse(), "reinforce++", "dppo", 0.6, 40),
        (CreditOverTurns(), "turn_grpo", "regular", 0.7, 24),
        (CreditOverTurns(), "token_reward", "dual_clip", 0.8, 20),
        (CreditOverTurns(), "gae", "decoupled_ppo", 0.7, 15),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_harder_tasks_are_learned(task: Task, estimator: str, loss: str, corridor: float, num_steps: int, seed: int):
    algorithm: dict[str, Any] = dict(advantage_estimator=estimator, policy_loss_type=loss, use_entropy_loss=True)
    learns(task, corridor, seed=seed, num_steps=num_steps, entropy_loss_coef=0.02, **algorithm)


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("reduction", ["sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_every_reduction_learns_to_copy(reduction: str):
    algorithm: dict[str, Any] = dict(advantage_estimator="rloo", loss_reduction=reduction, max_seq_len=2)
    learns(Copy(), 0.8, seed=0, num_steps=24, **algorithm)


def test_cross_entropy_learns_sorting_from_correct_responses():
    task = Sort()
    apprentice = Apprentice(task, {"policy_loss_type": "cross_entropy"}, num_steps=20, learning_rate=2e-2)
    episodes = [told(prompt, task.right_answer(prompt)) for prompt in task.prompts]
    train_on(apprentice, episodes, num_steps=20)
    assert share_of_the_way(task, apprentice.reward()) > 0.9


@pytest.mark.slow
def test_dpo_learns_to_copy_from_pairs():
    """Each right answer beside one with the last letter wrong, and the policy as it was as the reference."""
    task = Copy()
    settings = {"policy_loss_type": "dpo", "loss_reduction": "sequence_mean", "dpo": {"beta": 0.5}}
    apprentice = Apprentice(task, settings, num_steps=15, learning_rate=2e-2)
    episodes = []
    for prompt in task.prompts:
        first, second = task.right_answer(prompt)
        episodes += [told(prompt, [first, second]), told(prompt, [first, second % 3 + 1])]
    metrics = train_on(apprentice, episodes, num_steps=15, unit=2)
    assert metrics[0]["loss/policy_loss"] == pytest.approx(0.693147, abs=1e-5)  # log 2: it is the reference
    assert metrics[-1]["loss/policy_loss"] < 0.3
    assert metrics[-1]["token/dpo_accuracy"] == metrics[-1]["num_tokens"]


def told(prompt: list[int], answer: list[int]) -> Episode:
    episode = Episode(prompt)
    episode.add(answer, 1, [0.0] * len(answer))
    return episode


def train_on(
    apprentice: Apprentice, episodes: list[Episode], *, num_steps: int, unit: int = 1
) -> list[dict[str, float]]:
    """Steps on given answers, of which all see the log-probs at the beginning as the old ones; metrics of each."""
    batch = apprentice.batch_of(episodes, [str(row) for row in range(len(episodes))])
    lengths = batch.tensor("attention_mask").sum(dim=1).tolist()
    schedule = Schedule.of(lengths, [list(range(len(batch)))], 1, micro_batch_size=10, unit=unit)
    batch = apprentice.with_forwards(batch, schedule)
    batch["loss_weights"] = batch.tensor("loss_mask") / batch.tensor("loss_mask").sum()
    return [apprentice.train(apprentice.policy, batch, schedule) for _ in range(num_steps)]


def test_same_arguments_give_same_bits():
    first, second = (learn(ToolUse(), {"policy_loss_type": "clip_cov"}, num_steps=3, seed=5) for _ in range(2))
    assert first == second
    assert first != learn(ToolUse(), {"policy_loss_type": "clip_cov"}, num_steps=3, seed=6)


def test_environment_tokens_are_not_trained():
    apprentice = Apprentice(ToolUse())
    episodes, names = apprentice.rollouts(2)
    batch = apprentice.batch_of(episodes, names)
    assert batch.tensor("response_mask")[0].tolist() == [1, 1, 1, 1, 1]
    assert batch.tensor("loss_mask")[0].tolist() == [1, 0, 0, 0, 1]
    assert names == ["0", "0", "1", "1", "2", "2", "3", "3"]
