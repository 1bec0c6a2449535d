"""`skyrl_train.replay`: a stored sample is drawn again, to the bit, and differences are named."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_inspect import replay
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import Phase, RunFolder


@pytest.fixture(scope="module")
def finished(settings: Any, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of three steps with several turns and a checkpoint a step, evaluated after the second and the third."""
    changes = {
        "data": {"val_data": [prompts]},
        "trainer": {
            "max_training_steps": 3,
            "ckpt_interval": 1,
            "eval_interval": 2,
            "eval_before_train": False,
            "policy": {"optimizer_config": {"lr": 1e-2}},
        },
        "environment": {"env_class": "up_to_three_turns"},
        "generator": {
            "max_turns": 3,
            "num_inference_engines": 2,
            "eval_n_samples_per_prompt": 2,
            "eval_sampling_params": {"temperature": 1.0, "logprobs": 0, "max_generate_length": 12},
        },
    }
    cfg = settings(tmp_path_factory.mktemp("replay") / "run", changes)
    BasePPOExp(cfg).run()
    return RunFolder(cfg.trainer.run_dir)


def name_in(folder: RunFolder, step: int, position: int, phase: Phase = "train") -> str:
    row = folder.read_trajectories(step, phase)[position]
    return f"{row['uid']}_{row['sample']}"


def content(folder: RunFolder) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.slow
def test_training_sample_replays_bitwise(finished: RunFolder, capsys: pytest.CaptureFixture[str]):
    before = content(finished)
    for step, position in ((1, 0), (2, 7), (3, 15)):
        name = name_in(finished, step, position)
        status = replay.main([str(finished.path), "--sample", name, "--step", str(step)])
        printed = capsys.readouterr().out
        assert status == 0, printed
        num_tokens = len(finished.read_trajectories(step, "train")[position]["tokens"]["ids"])
        assert f"{num_tokens} of {num_tokens} tokens equal" in printed
        assert "largest difference of their log-probs: 0" in printed
    assert content(finished) == before, "nothing is written to the run's folder"


@pytest.mark.first_case
@pytest.mark.parametrize("step, position", [(2, 5), (3, 0)])
def test_evaluation_sample_replays_bitwise(finished: RunFolder, capsys: Any, step: int, position: int):
    name = name_in(finished, step, position, "eval")
    status = replay.main([str(finished.path), "--sample", name, "--step", str(step), "--phase", "eval"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    num_tokens = len(finished.read_trajectories(step, "eval")[position]["tokens"]["ids"])
    assert f"{num_tokens} of {num_tokens} tokens equal" in printed
    assert "largest difference of their log-probs: 0" in printed
    assert replay.main([str(finished.path), "--sample", name, "--step", "1", "--phase", "eval"]) == 2
    assert "no trajectories of evaluations of step 1; it has those of steps 2 to 3" in capsys.readouterr().err


def test_imported_file_registers_environment_before_replay(finished: RunFolder, tmp_path: Path, capsys: Any):
    code = """
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Pays7(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=7.0, done=True, metadata={})

skyrl_gym.register(id="pays_7", entry_point=Pays7)
"""
    (tmp_path / "mine.py").write_text(code)
    sample = ["--sample", name_in(finished, 1, 0), "--step", "1", "environment.env_class=pays_7"]
    try:
        assert replay.main([str(finished.path), *sample, "--import", str(tmp_path / "mine.py")]) == 1
    finally:
        skyrl_gym.deregister("pays_7")
    assert "stored, 7.0 drawn" in capsys.readouterr().out


@pytest.mark.slow
def test_replay_detects_other_weights_and_settings(finished: RunFolder):
    name = name_in(finished, 3, 1)
    with_other_weights = replay.replay(finished.path, name, step=3, checkpoint=0)
    assert not with_other_weights.is_equal
    hot = replay.replay(finished.path, name, step=3, overrides=["generator.sampling_params.temperature=3.0"])
    assert not hot.is_equal and any("log-prob" in line for line in hot.lines)


def test_invalid_arguments_are_named(finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = name_in(finished, 3, 0)
    without = tmp_path / "without"
    shutil.copytree(finished.path, without, ignore=shutil.ignore_patterns("global_step_*"))
    (without / "config.yaml").write_text(
        (without / "config.yaml").read_text().replace(str(finished.path), str(without))
    )
    mistakes = [
        ([str(tmp_path / "nowhere"), "--sample", name], "nowhere is not a run folder: it has no config.yaml"),
        ([str(finished.path), "--sample", "nobody_0"], "has no sample nobody_0: a name is UID_SAMPLE"),
        (
            [str(finished.path), "--sample", name, "--step", "9"],
            "no trajectories of step 9; it has those of steps 1 to 3",
        ),
        (
            [str(finished.path), "--sample", name, "--step", "3", "--checkpoint", "7"],
            "It has 1, 2, 3: pass --checkpoint",
        ),
        ([str(without), "--sample", name, "--step", "3"], "the weights after step 2, but"),
    ]
    for arguments, message in mistakes:
        assert replay.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_token_difference_is_reported_with_log_probs():
    tokens = {"ids": [5, 6, 7], "text": ["a", "b", "c"], "log_probs": [-1.0, -2.0, -3.0]}
    row = {"prompt_ids": [1], "prompt": "p", "tokens": tokens, "reward": 1.0, "stop_reason": "stop", "failure": None}
    other = row | {"tokens": {"ids": [5, 9], "text": ["a", "x"], "log_probs": [-1.5, -0.5]}, "reward": 0.0}
    found = replay.compare([row], [other])
    assert not found.is_equal
    assert found.lines == [
        "1 of 3 tokens equal",
        "token 1: 'b' (id 6, log-prob -2.0000) stored, 'x' (id 9, log-prob -0.5000) drawn",
        "largest difference of their log-probs: 0.5 (at token 0)",
        "reward: 1.0 stored, 0.0 drawn",
    ]
    assert replay.compare([row], [row]).is_equal
