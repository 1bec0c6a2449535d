"""Generators of users' own: columns become groups, whichever of the two methods a class overrides."""

from typing import Any

import pytest

from skyrl_train.generators.base import (
    Failure,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
    request_rollouts,
)
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.rollouts.adapter import to_generator_output, to_rollout_batch
from skyrl_train.rollouts.filters import map_trajectories, remove_rewards
from skyrl_train.rollouts.types import RolloutBatch

PROMPTS = [TrajectoryID("a", 0), TrajectoryID("a", 1), TrajectoryID("b", 0)]


def columns(**changes: Any) -> GeneratorOutput:
    """Two answers to a, and one to b that failed."""
    made: dict[str, Any] = {
        "prompt_token_ids": [[1], [1], [2]],
        "response_ids": [[3, 4], [5], [6, 7]],
        "rewards": [0.5, 1.0, 0.0],
        "loss_masks": [[1, 1], [1], [0, 0]],
        "stop_reasons": ["stop", "length", "error"],
        "rollout_metrics": {"environment/turns": 1.0},
        "rollout_logprobs": [[-1.0, -2.0], [-3.0], [0.0, 0.0]],
        "trajectory_ids": PROMPTS,
        "is_last_step": None,
        "weight_versions": [[3, 3], [4], [-1, -1]],
        "failures": [None, None, Failure("tool", "gone")],
    }
    return GeneratorOutput(**(made | changes))


class Columns(GeneratorInterface):
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        return columns(trajectory_ids=None)


def request() -> GeneratorInput:
    return GeneratorInput(prompts=[[]] * 3, env_classes=[""] * 3, trajectory_ids=PROMPTS)


async def test_custom_generator_columns_become_groups_of_requested_prompts():
    batch = await request_rollouts(Columns(), request())
    assert [(group.uid, len(group.trajectories)) for group in batch.groups] == [("a", 2), ("b", 1)]
    assert [trajectory.id for trajectory in batch.trajectories] == PROMPTS
    assert [sample.rewards for *_, sample in batch.rows()] == [[0.0, 0.5], [1.0], [0.0, 0.0]]
    assert batch.metrics == {"environment/turns": 1.0}
    assert to_generator_output(batch) == columns(rewards=[[0.0, 0.5], [1.0], [0.0, 0.0]])


@pytest.mark.parametrize("is_last_step", [None, [False, True, True]], ids=["whole", "turns"])
def test_columns_round_trip(is_last_step):
    ids = PROMPTS if is_last_step is None else [PROMPTS[0], PROMPTS[0], PROMPTS[2]]
    output = columns(
        rewards=[[0.0, 0.5], [1.0], [0.0, 0.0]],
        trajectory_ids=ids,
        is_last_step=is_last_step,
        stop_reasons=["stop", "stop", "error"],
    )
    assert to_generator_output(to_rollout_batch(output, list(dict.fromkeys(ids)))) == output


def test_unreported_values_stay_unknown():
    bare = columns(stop_reasons=None, rollout_logprobs=None, weight_versions=None, failures=None, rollout_metrics=None)
    batch = to_rollout_batch(bare, PROMPTS)
    for _, trajectory, sample in batch.rows():
        assert trajectory.stop_reason is trajectory.failure is sample.log_probs is sample.weight_versions is None
    output = to_generator_output(batch)
    assert output["stop_reasons"] is output["rollout_logprobs"] is output.get("weight_versions") is None


class OverridesColumns(SkyRLGymGenerator):
    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        output = await super().generate(input_batch, disable_tqdm)
        return GeneratorOutput(**{**output, "rewards": [0.0] * len(output["rewards"])})


class OverridesGroups(SkyRLGymGenerator):
    async def generate_groups(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> RolloutBatch:
        return map_trajectories(await super().generate_groups(input_batch, disable_tqdm), remove_rewards)


class InheritsGroups(OverridesGroups):
    pass


@pytest.mark.parametrize("kind", [OverridesColumns, OverridesGroups, InheritsGroups])
async def test_override_of_either_method_is_used_by_trainer_and_users(game, say, characters, kind):
    extras = [{"steps": [{"reward": 1.0}]}]
    played = await game(characters, [[say("a")] * 3], extras, generator_class=kind).play()
    assert [sum(reward) if isinstance(reward, list) else reward for reward in played.output["rewards"]] == [0.0]
    request = GeneratorInput(prompts=[[{"role": "user", "content": "Q"}]], env_classes=["scripted"], env_extras=extras)
    batch = await request_rollouts(played.generator, request)
    assert [(each.failure, each.reward) for each in batch.trajectories] == [(None, 0.0)]
    [plain] = (await SkyRLGymGenerator.generate_groups(played.generator, request)).trajectories
    assert (plain.failure, plain.reward) == (None, 1.0)
