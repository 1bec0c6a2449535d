"""`python -m skyrl_train.entrypoints.simulate`: from options and from a run folder."""

import re

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.config import get_config_as_yaml_str
from skyrl_train.entrypoints.simulate import fit_iteration, main, measured
from skyrl_train.utils.run_folder import RunFolder

OPTIONS = {
    "--lengths": "10:15,100:1", "--groups": "4", "--samples": "2", "--engines": "2", "--seconds-per-iteration": "0.1",
    "--step-seconds": "2", "--sync-seconds": "0.5",
}  # fmt: skip


def arguments(**changes: str) -> list[str]:
    options = OPTIONS | {f"--{name}": value for name, value in changes.items()}
    return [text for name, value in options.items() if value for text in (name, value)]


def test_table_of_choices_and_the_best_of_them(capsys):
    assert main(arguments()) == 0
    out = capsys.readouterr().out
    gains = [float(gain) for gain in re.findall(r" ([0-9.]+)x ", out)]
    assert gains[0] == 1.0 and max(gains) > 1.5
    staleness, running = map(int, re.search(r"best: .*max_staleness_steps=(\d+) .*workers=(\d+)", out).groups())
    assert 4 <= running <= 4 * (staleness + 1)


def test_gpus_are_split_between_engines_and_training(capsys):
    assert main(arguments(gpus="4", engines="4")) == 0
    assert re.search(r"best: .*, [123] engines", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ""}, "--lengths is needed"),
        ({"lengths": "10:x"}, "tokens:weight"),
        ({"gpus": "5"}, "multiple of the number of engines"),
    ],
)
def test_wrong_options_are_named(changes, message, capsys):
    assert main(arguments(**changes)) == 2
    assert message in capsys.readouterr().err


def test_folder_without_steps_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "no_run")]) == 2
    assert "no_run has no finished training step" in capsys.readouterr().err


def test_folder_of_an_asynchronous_run_is_refused(tmp_path, capsys):
    RunFolder(tmp_path).append_metrics(1, {"async/staleness_mean": 1.0, "timing/step": 2.0})
    assert main([str(tmp_path)]) == 2
    assert "is a run of asynchronous training" in capsys.readouterr().err


def test_cost_of_an_iteration_is_fitted():
    equations = [(x, y, 0.5 * x + 0.01 * y) for x, y in [(10, 100), (20, 120), (15, 300)]]
    assert fit_iteration(equations) == pytest.approx((0.5, 0.01))
    assert fit_iteration([(10, 100, 5.0), (10, 100, 7.0)]) == pytest.approx((0.6, 0.0))  # nothing tells them apart


def test_workload_of_a_run_folder(tmp_path, capsys):
    cfg = SkyRLConfig()
    cfg.trainer.train_batch_size, cfg.generator.num_inference_engines = 2, 1
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
    workload = measured(tmp_path)
    assert [[sample.num_tokens for sample in group] for group in workload.groups] == [[4, 4], [8, 8], [8, 8], [16, 16]]
    assert (workload.costs.step_seconds, workload.costs.sync_seconds) == pytest.approx((3.0, 1.0))
    assert workload.costs.seconds_per_iteration == pytest.approx(0.5)
    assert main([str(tmp_path)]) == 0
    assert "2 groups of 2 samples a step" in capsys.readouterr().out
