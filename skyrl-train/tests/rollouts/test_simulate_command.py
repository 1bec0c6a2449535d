"""`python -m skyrl_train.entrypoints.simulate`: from options and from a run folder."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_inspect.simulate.__main__ import main
from skyrl_inspect.simulate.comparison import STALENESS, find_maximum, simulate_synchronous
from skyrl_inspect.simulate.workloads import fit_iteration, read_workload, replay
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.asynchronous import FullyAsyncConfig
from skyrl_train.config.config import get_config_as_yaml_str
from skyrl_train.config.validation import validate_cfg
from skyrl_train.utils.run_folder import RunFolder

OPTIONS = {
    "--lengths": "10:15,100:1", "--groups": "4", "--samples": "2", "--engines": "2", "--seconds-per-iteration": "0.1",
    "--step-seconds": "2", "--sync-seconds": "0.5",
}  # fmt: skip


def arguments(**changes: str) -> list[str]:
    options = OPTIONS | {f"--{name}": value for name, value in changes.items()}
    return [text for name, value in options.items() if value for text in (name, value)]


def settings_of(line: str) -> SkyRLConfig:
    """Parse a line of overrides as a run with a batch of four prompts would."""
    settings: dict[str, Any] = {
        "data": {"train_data": ["train.jsonl"], "val_data": []},
        "environment": {"env_class": "gsm8k"},
        "trainer": {"train_batch_size": 4, "policy_mini_batch_size": 4, "placement": {"device": "cpu"}},
    }
    for override in line.split():
        name, _, value = override.partition("=")
        *sections, key = name.split(".")
        section = settings
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = json.loads(value) if value.isdigit() or value in ("true", "false") else value
    return validate_cfg(settings)


@pytest.mark.first_case
@pytest.mark.parametrize("changes", [{}, {"gpus": "4", "engines": "4"}, {"lengths": "10:1"}])
def test_printed_best_choice_is_valid_configuration(changes: dict[str, str], capsys: Any):
    assert main(arguments(**changes)) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer.fully_async")]
    settings = settings_of(line).trainer.fully_async
    assert settings.enabled and settings.max_staleness_steps in STALENESS
    assert "order=" in line and "on_stale=" in line
    assert ("policy_loss_type=decoupled_ppo" if settings.max_staleness_steps > 1 else "tis_ratio_type=token") in line


def test_table_has_all_schedules_and_excludes_masked_groups(capsys: Any):
    started = time.process_time()
    assert main(arguments()) == 0
    assert time.process_time() - started < 5
    out = capsys.readouterr().out
    gains = [float(gain) for gain in re.findall(r" ([0-9.]+)x ", out)]
    assert gains[0] == 1.0 and max(gains) > 1.5
    for schedule in ("exact", "finished regenerate", "finished mask"):
        assert len(re.findall(rf"^{schedule} +[1248] ", out, re.MULTILINE)) >= 4
    masked = [int(share) for share in re.findall(r"^finished mask .*? (\d+)% +0%  ", out, re.MULTILINE)]
    assert len(masked) == 4 and min(masked) > 5
    assert "best" in out and "on_stale=mask" not in out, "what masks most of the long answers is not recommended"


def test_gpus_are_split_between_engines_and_training(capsys: Any):
    assert main(arguments(gpus="4", engines="4")) == 0
    out = capsys.readouterr().out
    [(engines, training)] = re.findall(r"^# (\d) GPUs for \d engines, (\d) for training", out, re.MULTILINE)
    assert int(engines) + int(training) == 4 and f"generator.num_inference_engines={engines}" in out


def test_maximum_of_unimodal_function_is_found():
    for peak in range(16):
        asked: set[int] = set()
        assert find_maximum(lambda x, peak=peak, asked=asked: asked.add(x) or -abs(x - peak), 16, 8, 4) == peak
        assert len(asked) <= 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ""}, "--lengths is required"),
        ({"lengths": "10:x"}, "tokens:weight"),
        ({"gpus": "5"}, "multiple of the number of engines"),
    ],
)
def test_invalid_options_are_named(changes, message, capsys):
    assert main(arguments(**changes)) == 2
    assert message in capsys.readouterr().err


def test_folder_without_steps_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "no_run")]) == 2
    assert "no_run has no finished training step" in capsys.readouterr().err


@pytest.fixture
def asynchronous_run(tmp_path: Path) -> Path:
    """A run of 6 steps of 6 s: two groups of a sample are generated in 2 s, trained in 3 s, and synced in 1 s. One of
    each step is too old for the bound."""
    cfg = SkyRLConfig()
    cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt = 2, 1
    cfg.trainer.fully_async = FullyAsyncConfig(enabled=True, max_staleness_steps=0, order="exact", on_stale="mask")
    run = RunFolder(tmp_path)
    run.write_config(get_config_as_yaml_str(cfg))
    for step in range(1, 7):
        metrics = {"async/staleness_mean": 0.0, "async/staleness_violation_count": 1.0, "time": 6.0 * step}
        timings = {"timing/wait_for_generation_buffer": 2.0, "timing/sync_weights": 1.0, "timing/step": 6.0}
        began = 6.0 * (step - 1)
        groups = [[2 * step - 2 + slot, slot, began, began + 2, step - 1, "finished"] for slot in range(2)]
        with run.metrics_path.open("a") as file:
            file.write(json.dumps({"step": step} | metrics | timings) + "\n")
        run.append_timeline(step, {"groups": groups})
    return tmp_path


def test_folder_of_async_run_is_replayed(asynchronous_run: Path, capsys: Any):
    assert replay(asynchronous_run) == pytest.approx((1 / 6, 2 / 6))
    assert main([str(asynchronous_run)]) == 0
    out = capsys.readouterr().out
    assert "this run: 0.167 samples/s; 0.333 in a simulation of its schedule" in out
    assert "2 s a group (at most 2); training 3 s a step, weight sync 1 s" in out


def test_gpu_split_is_refused_for_group_durations(asynchronous_run: Path, capsys: Any):
    assert main([str(asynchronous_run), "--gpus", "4"]) == 2
    assert "only durations of groups" in capsys.readouterr().err


def test_environment_times_are_read_from_run(tmp_path: Path):
    """An engine takes 0.1 s a token. One sample of four waits for its environment for 6 s, the others not at all: the
    synchronous step takes as long as the slow one."""
    cfg = SkyRLConfig()
    cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt = 2, 2
    run = RunFolder(tmp_path)
    run.write_config(get_config_as_yaml_str(cfg))
    waits, lengths = [6.0, 0.0, 0.0, 0.0], [5, 5, 10, 20]
    for step in (1, 2):
        names = [(str(prompt), sample) for prompt in range(2) for sample in range(2)]
        mask = [{"tokens": {"loss_mask": [1] * num}} for num in lengths]
        rows = [{"uid": uid, "sample": sample} | tokens for (uid, sample), tokens in zip(names, mask, strict=True)]
        run.write_trajectories(step, "train", rows)
        run.append_metrics(step, {"timing/generate": 6.5, "timing/sync_weights": 0.0, "timing/step": 7.5})
        spans = zip(names, lengths, waits, strict=True)
        groups = [[f"{step}:{uid}_{n}", 0, 0.0, num * 0.1 + wait, 0, "finished"] for (uid, n), num, wait in spans]
        run.append_timeline(step, {"groups": groups})
    workload = read_workload(tmp_path)
    found = [sample.wait_seconds for group in workload.groups for sample in group]
    seconds = [num * workload.costs.seconds_per_iteration + wait for num, wait in zip(lengths * 2, found, strict=True)]
    assert seconds == pytest.approx([6.5, 0.5, 1.0, 2.0] * 2, abs=0.05)
    assert simulate_synchronous(workload).run.samples_per_second == pytest.approx(4 / 7.5, rel=0.1)


def test_iteration_cost_is_fitted():
    equations = [(x, y, 0.5 * x + 0.01 * y) for x, y in [(10, 100), (20, 120), (15, 300)]]
    assert fit_iteration(equations) == pytest.approx((0.5, 0.01))
    assert fit_iteration([(10, 100, 5.0), (10, 100, 7.0)]) == pytest.approx((0.6, 0.0))  # nothing tells them apart


def test_workload_is_read_from_run_folder(tmp_path, capsys):
    cfg = SkyRLConfig()
    cfg.trainer.train_batch_size, cfg.generator.num_inference_engines = 2, 1
    cfg.trainer.algorithm.policy_loss_type = "gspo"
    run = RunFolder(tmp_path)
    run.write_config(get_config_as_yaml_str(cfg))
    for step in (1, 2):
        rows = [
            {"uid": str(prompt), "sample": sample, "tokens": {"loss_mask": [1] * (4 * step * (1 + prompt)) + [0]}}
            for prompt in range(2)
            for sample in range(2)
        ]
        run.write_trajectories(step, "train", rows)
        timing = {"timing/generate": 8 * step * 0.5, "timing/sync_weights": 1.0, "timing/step": 8 * step * 0.5 + 4.0}
        run.append_metrics(step, timing)
    workload = read_workload(tmp_path)
    assert [[sample.num_tokens for sample in group] for group in workload.groups] == [[4, 4], [8, 8], [8, 8], [16, 16]]
    assert (workload.costs.step_seconds, workload.costs.sync_seconds) == pytest.approx((3.0, 1.0))
    assert workload.costs.seconds_per_iteration == pytest.approx(0.5)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 groups of 2 samples a step" in out
    assert "tis_ratio_type=token" in out and "decoupled_ppo" not in out, "the run keeps its loss"
