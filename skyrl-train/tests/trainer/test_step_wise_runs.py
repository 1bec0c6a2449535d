"""Training on turns is training on the conversations that they are, where conversations only append."""

import pytest

from skyrl_train.utils.run_folder import RunFolder, read_json_lines
from skyrl_train.utils.token_columns import decode_columns

CONVERSATIONS = {
    "environment": {"env_class": "up_to_three_turns"},
    "generator": {"max_turns": 3, "max_input_length": 120},
}


KINDS = {
    "whole": {},
    "joined": {"step_wise_trajectories": True, "merge_stepwise_output": True},
    "apart": {"step_wise_trajectories": True},
}


@pytest.fixture(scope="module")
def folders(settings, run, merged, tmp_path_factory) -> dict[str, RunFolder]:
    """Run folders of the same run, by the rows that its conversations became."""
    found = {}
    for name, generator in KINDS.items():
        cfg = settings(tmp_path_factory.mktemp(name) / "run", merged(CONVERSATIONS, {"generator": generator}))
        run(cfg)
        found[name] = RunFolder(cfg.trainer.run_dir)
    return found


@pytest.mark.first_case
@pytest.mark.parametrize("name", KINDS)
def test_run_folder_has_training_columns_of_each_token(folders, name):
    for file in folders[name].list_trajectory_files():
        rows = folders[name].read_trajectories(file.step, "train")
        columns = [row for _, row in read_json_lines(folders[name].token_columns_path(file.step))]
        assert [row["uid"] for row in columns] == [row["uid"] for row in rows]
        entropies = []
        for row, own in zip(rows, map(decode_columns, columns), strict=True):
            tokens = row["tokens"]
            assert own["trained"] == tokens["loss_mask"]
            assert {len(values) for values in own.values()} == {len(tokens["ids"])}
            generated = [index for index, mask in enumerate(tokens["loss_mask"]) if mask]
            gaps = [abs(own["trainer_log_probs"][i] - tokens["log_probs"][i]) for i in generated]
            assert max(gaps) < 1e-4, "engine and trainer have the same weights, in float32"
            assert all(own["advantages"][i] is None for i, mask in enumerate(tokens["loss_mask"]) if not mask)
            entropies += [own["entropies"][i] for i in generated]
            assert len({own["advantages"][i] for i in generated}) == 1, "of the group-relative estimator"
        metrics = next(row for row in folders[name].read_metrics() if row["step"] == file.step)
        assert sum(entropies) / len(entropies) == pytest.approx(metrics["policy/policy_entropy"], rel=1e-3)


def test_joined_and_separate_turns_train_same_as_full_conversations(folders):
    """The same tokens with the same advantages: the same numbers, but for the order in which they are added."""
    results = {name: folder.read_metrics() for name, folder in folders.items()}
    for step, expected in enumerate(results["whole"]):
        assert expected["generate/avg_num_turns"] > 1
        # From the second step on weights differ in their last bits, and log-probs with them.
        losses = ["policy/final_loss", "policy/grad_norm", "policy/policy_entropy", "loss/avg_final_rewards"]
        losses.append("generate/entropy")
        names = [name for name in expected if name.startswith(("reward/", "generate/", "environment/"))]
        names = [name for name in names if name not in ("generate/entropy", "generate/forward_seconds")]
        for name in ("joined", "apart"):
            found = results[name][step]
            for metric in names:
                assert found[metric] == expected[metric], metric
            for metric in losses:
                assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
