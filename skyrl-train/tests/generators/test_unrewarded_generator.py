"""`examples/on_policy_distillation`: the environments' rewards reach evaluations, and never the training."""

import importlib.util
from pathlib import Path

import pytest

MAIN = Path(__file__).parents[3] / "examples/on_policy_distillation/main_distillation.py"


@pytest.fixture(scope="module")
def unrewarded_generator():
    spec = importlib.util.spec_from_file_location("main_distillation", MAIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UnrewardedGenerator


@pytest.mark.parametrize("step_wise", [False, True], ids=["whole", "turns"])
async def test_rewards_train_nothing_and_are_told_as_a_metric(game, say, characters, unrewarded_generator, step_wise):
    answers = [[say("a"), say("b")], [say("c")], [say("d")]]
    extras = [
        {"steps": [{"reward": 0.5, "says": "x"}, {"reward": 1.0}]},
        {"steps": [{"reward": 0.5}]},
        {"steps": [{"reward": float("nan")}]},  # failed: no part of the mean
    ]
    settings = {"step_wise_trajectories": step_wise}

    async def play(phase):
        return (
            await game(
                characters, answers, extras, settings=settings, generator_class=unrewarded_generator, phase=phase
            ).play()
        ).output

    training, evaluation = await play("train"), await play("eval")
    assert not any(any(rewards) for rewards in training["rewards"])
    assert training["rollout_metrics"]["environment/avg_score"] == (1.5 + 0.5) / 2
    assert sum(sum(rewards) for rewards in evaluation["rewards"]) == 2.0
    assert training["loss_masks"] == evaluation["loss_masks"]
    assert any(training["loss_masks"][0])
