"""Paired comparison of evaluations, by hand."""

import json

import pytest

from skyrl_gym.error import Error
from skyrl_gym.eval.compare import compare_folders, main
from skyrl_gym.eval.records import EpisodeFile, EpisodeRecord
from skyrl_gym.eval.statistics import bootstrap, sign_test

SETTINGS = {"--env": "math", "--data": "d1", "--success-at": 1.0, "--model": "a", "--temperature": 0.6}


def evaluation(folder, answers, **settings):
    """An evaluation's folder, from the outcomes of each task's samples; None is a failed episode."""
    identity = SETTINGS | {f"--{name}": value for name, value in settings.items()}
    with EpisodeFile(folder, identity) as file:
        for task, outcomes in answers.items():
            for sample, right in enumerate(outcomes):
                failure = "infra" if right is None else None
                success = None if right is None else bool(right)
                file.add(EpisodeRecord(task=task, sample=sample, success=success, failure=failure))
    return folder


def compared(a, b):
    (comparison,), _ = compare_folders(a, b)
    return comparison


def test_difference_and_counts_by_hand(tmp_path):
    """Shares 1, 1/2, 0, 0 and 1/2, 1, 1, 0: differences -1/2, +1/2, +1, 0."""
    a = evaluation(tmp_path / "a", {0: [1, 1], 1: [1, 0], 2: [0, 0], 3: [0, 0]})
    b = evaluation(tmp_path / "b", {0: [1, 0], 1: [1, 1], 2: [1, 1], 3: [0, 0]}, model="b")
    found = compared(a, b)
    assert (found.mean_a, found.mean_b, found.difference.mean) == (0.375, 0.625, 0.25)
    assert (found.difference.low, found.difference.high) == bootstrap([-0.5, 0.5, 1.0, 0.0])
    assert (found.num_won, found.num_lost, found.num_tied) == (2, 1, 1)
    assert found.sign_p == 1.0  # of 3 coins, 1 or fewer or 2 or more heads: always
    assert found.verdict == "not distinguishable from noise"
    assert found.other_settings == ()
    mirrored = compared(b, a)
    assert (mirrored.difference.mean, mirrored.num_won, mirrored.num_lost) == (-0.25, 1, 2)


@pytest.mark.parametrize(
    "won, lost, p",
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (6, 0, 2 / 64),
        (1, 9, 2 * 11 / 1024),  # 0 or 1 of 10: (1 + 10) / 1024, on both sides
        (8, 2, 2 * 56 / 1024),  # 1 + 10 + 45
        (5, 5, 1.0),
        (3000, 3000, 1.0),
    ],
)
def test_sign_test_is_exact(won, lost, p):
    assert sign_test(won, lost) == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize(
    "outcomes_a, outcomes_b, verdict",
    [
        ([0] * 10, [1] * 10, "B is better than A: distinguishable from noise"),
        ([1] * 10, [0] * 10, "A is better than B: distinguishable from noise"),
        # A bootstrap of three equal differences has an interval of width 0; three coins may all show heads.
        ([0] * 3, [1] * 3, r"inconclusive: the interval excludes 0, but the sign test does not confirm it (p = 0.25)"),
        ([0, 1] * 10, [1, 0] * 10, "not distinguishable from noise"),
        ([1] * 10, [1] * 10, "not distinguishable from noise"),
    ],
)
def test_verdict_in_words(tmp_path, outcomes_a, outcomes_b, verdict):
    a = evaluation(tmp_path / "a", {task: [right] for task, right in enumerate(outcomes_a)})
    b = evaluation(tmp_path / "b", {task: [right] for task, right in enumerate(outcomes_b)})
    assert compared(a, b).verdict == verdict


def test_many_small_gains_and_few_large_losses_are_not_settled(tmp_path):
    """The sign test counts 30 wins to 6 losses; the mean, 30 * 0.1 - 6 * 0.5, is 0."""
    a = {task: [0] * 10 for task in range(30)} | {task: [1] * 10 for task in range(30, 36)}
    b = {task: [1] + [0] * 9 for task in range(30)} | {task: [1, 0] * 5 for task in range(30, 36)}
    found = compared(evaluation(tmp_path / "a", a), evaluation(tmp_path / "b", b))
    assert found.difference.mean == pytest.approx(0, abs=1e-12)
    assert found.verdict.startswith("inconclusive: the sign test finds a difference")


def test_tasks_missing_on_either_side_are_excluded_and_counted(tmp_path):
    """Missing ones, and those of which every episode failed."""
    a = evaluation(tmp_path / "a", {0: [1], 1: [0], 2: [None], 3: [1]})
    b = evaluation(tmp_path / "b", {0: [1], 1: [None, 1], 2: [1]})
    found = compared(a, b)
    assert (found.difference.num_tasks, found.only_in_a, found.only_in_b) == (2, 1, 1)
    assert (found.mean_a, found.mean_b) == (0.5, 1.0)
    with (b / "episodes.jsonl").open("a") as file:
        file.write('{"task": 3, "sam')  # a line that a killed evaluation left unfinished
    assert compared(a, b).difference.num_tasks == 2


@pytest.mark.parametrize("flag, value", [("data", "d2"), ("env", "aime"), ("success-at", 0.5)])
def test_evaluations_of_other_tasks_are_refused(tmp_path, flag, value):
    a = evaluation(tmp_path / "a", {0: [1]})
    b = evaluation(tmp_path / "b", {0: [1]}, **{flag: value})
    with pytest.raises(Error, match=f"--{flag} is"):
        compare_folders(a, b)


def test_evaluations_without_common_task_are_rejected(tmp_path):
    a, b = evaluation(tmp_path / "a", {0: [1]}), evaluation(tmp_path / "b", {1: [1]})
    with pytest.raises(Error, match="scored episode"):
        compare_folders(a, b)


def test_folders_of_suites_are_compared_suite_by_suite(tmp_path, capsys):
    for run, right in (("a", 0), ("b", 1)):
        evaluation(tmp_path / run / "math500", {task: [right] for task in range(8)}, model=run)
        evaluation(tmp_path / run / "aime24", {task: [1] for task in range(8)}, model=run)
    evaluation(tmp_path / "b" / "gsm8k", {0: [1]}, temperature=0.0)
    (tmp_path / "b" / "suites.json").write_text("[]")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    aime24, rest = printed.split("math500: 8 tasks in both")
    assert "aime24: 8 tasks in both" in aime24 and "B wins 0, loses 0, ties 8; sign test p = 1" in aime24
    assert "B - A     +1.0000  95% [+1.0000, +1.0000] (bootstrap)" in rest
    assert "B wins 8, loses 0, ties 0; sign test p = 0.00781" in rest
    mean = rest.partition("mean of 2 suites, each counted once\n")[2]
    assert "  B - A     +0.5000" in mean and "B wins 8, loses 0; sign test p = 0.00781" in mean
    assert "verdict   B is better than A: distinguishable from noise" in mean
    assert "not compared, only in one folder: gsm8k" in rest


def test_differing_settings_are_reported(tmp_path, capsys):
    a, b = evaluation(tmp_path / "a", {0: [1]}), evaluation(tmp_path / "b", {0: [1]}, temperature=1.0, model="b")
    assert main([str(a), str(b)]) == 0
    assert "caution   made with different --temperature\n" in capsys.readouterr().out


def test_folder_without_evaluation_is_named(tmp_path, capsys):
    a = evaluation(tmp_path / "a", {0: [1]})
    assert main([str(a), str(tmp_path)]) == 2
    assert f"{tmp_path} is not an evaluation folder" in capsys.readouterr().err
    (tmp_path / "x").mkdir()
    assert main([str(tmp_path), str(tmp_path / "x")]) == 2
    assert "no evaluation is in both folders" in capsys.readouterr().err
    (a / "settings.json").write_text(json.dumps(["not", "settings"])[:5])
    assert main([str(a), str(a)]) == 2
