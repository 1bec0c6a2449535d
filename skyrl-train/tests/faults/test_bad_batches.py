"""Bad input is refused before anything starts, or recorded by name: no run ends at step 40 because of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train import batch_preparation
from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl_train.rollouts.collate import collate
from skyrl_train.rollouts.faults import LengthLimits, record_faults
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup
from skyrl_train.workers.objectives.policy import checked_loss


@pytest.mark.parametrize(
    "trainer, generator, rule",
    [
        ({"train_batch_size": 100, "policy_mini_batch_size": 48}, {}, "train_batch_size"),
        ({}, {"n_samples_per_prompt": 1}, "n_samples_per_prompt=1"),
        ({"algorithm": {"advantage_estimator": "gae"}}, {}, "trainer.critic.model.path"),
        ({"algorithm": {"use_kl_loss": True, "use_kl_in_reward": True}}, {}, "would count the KL divergence twice"),
        ({"max_tokens_per_microbatch": 0}, {}, "max_tokens_per_microbatch"),
        (
            {"algorithm": {"overlong_buffer": {"len": 64}}},
            {"sampling_params": {"max_generate_length": 32}},
            "generator.sampling_params.max_generate_length=32",
        ),
    ],
    ids=["batches that do not divide", "group of one", "gae without critic", "two KL terms", "budget", "overlong"],
)
def test_refused_before_anything_starts(trainer: dict[str, Any], generator: dict[str, Any], rule: str):
    values = {"trainer": {"placement": {"device": "cpu"}, **trainer}, "generator": generator}
    with pytest.raises(ConfigError, match=rule):
        validate_cfg(SkyRLConfig.from_dict(values))


class Padding:
    """All of a tokenizer that a batch needs."""

    pad_token_id = 0


def answers(rewards: list[float], lengths: list[int], masks: list[int] | None = None) -> RolloutBatch:
    """Answers to one prompt."""
    columns = enumerate(zip(rewards, lengths, masks or [1] * len(rewards), strict=True))
    trajectories = [
        Trajectory(
            TrajectoryID("question", number),
            [TrainingSample([5, 6], [7] * length, [mask] * length, [0.0] * (length - 1) + [reward])],
            "stop",
        )
        for number, (reward, length, mask) in columns
    ]
    return RolloutBatch([TrajectoryGroup("question", trajectories)])


def checked(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch as the trainer takes it, with limits of 4 tokens a prompt and 8 an answer."""
    return record_faults(batch, LengthLimits(max_input_length=4, max_generate_length=8, one_answer_a_sample=True))


def prepared(batch: RolloutBatch) -> tuple[Any, dict[str, float]]:
    """Return the batch that a training step makes of them."""
    cfg = SkyRLConfig.from_dict({"trainer": {"algorithm": {"grpo_norm_by_std": False}}})
    return batch_preparation.prepare_training_batch(collate(batch, Padding(), step=1), cfg, 0.0)  # type: ignore[arg-type]


def failure_of(batch: RolloutBatch, number: int) -> tuple[str, str]:
    failure = batch.trajectories[number].failure
    assert failure is not None
    return failure.kind, failure.message


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_non_numeric_reward_is_recorded_and_excluded_from_baseline(reward: float):
    rollouts = checked(answers([1.0, 0.0, reward], [2, 2, 2]))
    batch, _ = prepared(rollouts)
    assert failure_of(rollouts, 2) == (
        "reward",
        f"trajectory question_2 must have finite numbers as rewards; got {reward!r}",
    )
    assert batch["advantages"][:, 0].tolist() == [0.5, -0.5, 0.0]
    assert batch["loss_mask"].sum(dim=1).tolist() == [2, 2, 0]


def test_response_over_limit_is_recorded_and_truncated():
    rollouts = checked(answers([1.0, 0.0, 1.0], [2, 2, 5000]))
    batch, _ = prepared(rollouts)
    kind, message = failure_of(rollouts, 2)
    assert kind == "infrastructure"
    assert message.startswith("trajectory question_2 has a response of 5000 tokens; max_generate_length is 8")
    assert batch["advantages"][:, 0].tolist() == [0.5, -0.5, 0.0]
    assert batch["sequences"].shape[1] < 64, "it would have cost the whole step its memory"


def test_fully_masked_row_counts_in_no_denominator():
    """The reward of the row still counts, as that of a truncated response does (`apply_overlong_filtering`)."""
    batch, metrics = prepared(answers([1.0, 0.0, 0.5], [2, 2, 2], masks=[1, 1, 0]))
    weights = batch_preparation.loss_weights(batch, [[0, 1, 2]], "sequence_mean")
    assert weights.sum(dim=1).tolist() == [0.5, 0.5, 0.0]
    assert metrics["loss/share_of_rows_trained"] == pytest.approx(2 / 3)
    nothing, _ = prepared(answers([1.0, 0.0], [2, 2], masks=[0, 0]))
    assert batch_preparation.loss_weights(nothing, [[0, 1]], "token_mean").sum() == 0
    assert torch.isfinite(nothing["advantages"]).all()


@pytest.mark.parametrize(
    "returned, got",
    [
        (torch.zeros(()), r"and a dict of metrics; got a tensor \(\)"),
        (torch.zeros(2, 3), r"and a dict of metrics; got a tensor \(2, 3\)"),
        ((torch.zeros(()), {}), r"; got a tensor \(\)\. The trainer reduces it \(trainer.algorithm.loss_reduction\)"),
        ((torch.zeros(2, 3), {"clip": 0.5}), "metrics that are tensors of this shape; 'clip' is float"),
        (None, "got NoneType"),
    ],
)
def test_invalid_policy_loss_result_is_error_with_expected_form(returned: Any, got: str):
    rule = r"trainer.algorithm.policy_loss_type='mine' must return the loss of every token, \(2, 3\)"
    with pytest.raises(ConfigError, match=f"^{rule}.*{got}"):
        checked_loss(returned, "mine", torch.Size((2, 3)))


@pytest.mark.parametrize("returned", [torch.zeros(2), (torch.zeros(2), torch.zeros(2)), torch.zeros(2, 3), None])
def test_invalid_estimator_result_is_error_with_expected_form(returned: Any):
    AdvantageEstimatorRegistry.register("odd", lambda **_: returned)
    try:
        cfg = SkyRLConfig.from_dict({"trainer": {"algorithm": {"advantage_estimator": "odd"}}})
        batch = collate(answers([1.0, 0.0], [2, 3]), Padding(), step=1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="advantage_estimator"):
            batch_preparation.prepare_training_batch(batch, cfg, 0.0)
    finally:
        AdvantageEstimatorRegistry.unregister("odd")


def test_step_with_all_rollouts_failed_is_reported():
    with pytest.raises(SkyRLError, match="reward: trajectory question_0"):
        prepared(checked(answers([math.nan, math.inf], [2, 2])))


class Careless(GeneratorInterface):
    """A user's generator whose answers are, in this order for every prompt: rewarded with NaN, too long, masked
    entirely, and two good ones."""

    def __init__(self, inner: GeneratorInterface):
        self._inner = inner

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await self._inner.generate(input_batch)
        for row in range(len(output["response_ids"])):
            length = len(output["response_ids"][row])
            per_token = [0.0] * (length - 1)
            output["rewards"][row] = [*per_token, float(row % 2)]  # type: ignore[call-overload]
            if row % 5 == 0:
                output["rewards"][row] = [*per_token, math.nan]  # type: ignore[call-overload]
            elif row % 5 == 1:
                for key in ("response_ids", "rewards", "loss_masks", "rollout_logprobs", "weight_versions"):
                    column: Any = output[key]  # type: ignore[literal-required]
                    column[row] = column[row] * 100
            elif row % 5 == 2:
                output["loss_masks"][row] = [0] * length
        return output


@pytest.mark.timeout(300)
async def test_invalid_generator_samples_are_excluded_alone(start_run, scripted_experiment, prompt, tmp_path: Path):
    class WithCarelessGenerator(scripted_experiment):
        def get_generator(self, *parts: Any) -> GeneratorInterface:
            return Careless(super().get_generator(*parts))

    script = [[prompt("works", content=text) for text in ("1+1=", "2+2=")]] * 2
    changes = {"generator": {"n_samples_per_prompt": 5}, "trainer": {"policy_mini_batch_size": 1}}
    async with start_run(tmp_path, script, experiment=WithCarelessGenerator, **changes) as trainer:
        await trainer.train()
        batch = trainer.last_batch
    assert batch.metadata["valid"] == [False, False, True, True, True] * 2
    assert batch["loss_mask"].any(dim=1).tolist() == [False, False, False, True, True] * 2
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for metrics in steps:
        assert (metrics["generate/num_failed/reward"], metrics["generate/num_failed/infrastructure"]) == (2, 2)
        assert metrics["policy/grad_norm"] > 0 and metrics["policy/skipped_updates"] == 0
        assert metrics["policy/first_ratio_max_deviation"] == 0.0 and metrics["policy/ratio_alarms"] == 0
