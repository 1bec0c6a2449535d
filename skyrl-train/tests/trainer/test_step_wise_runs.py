"""Training on turns is training on the conversations that they are, where conversations only append."""

import pytest

CONVERSATIONS = {
    "environment": {"env_class": "up_to_three_turns"},
    "generator": {"max_turns": 3, "max_input_length": 120},
}


def test_turns_joined_or_apart_learn_what_whole_conversations_do(settings, run, merged, tmp_path):
    """The same tokens with the same advantages: the same numbers, but for the order in which they are added."""
    results = {}
    for name, generator in {
        "whole": {},
        "joined": {"step_wise_trajectories": True, "merge_stepwise_output": True},
        "apart": {"step_wise_trajectories": True},
    }.items():
        results[name] = run(settings(tmp_path / name, merged(CONVERSATIONS, {"generator": generator})))
    for step, expected in enumerate(results["whole"]):
        assert expected["generate/avg_num_turns"] > 1
        names = [name for name in expected if name.startswith(("reward/", "generate/", "environment/"))]
        losses = ["policy/final_loss", "policy/grad_norm", "policy/policy_entropy", "loss/avg_final_rewards"]
        for name in ("joined", "apart"):
            found = results[name][step]
            for metric in names:
                assert found[metric] == expected[metric], metric
            for metric in losses:
                assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
