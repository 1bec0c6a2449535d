"""Load of GPUs; nvidia-smi is a script that prints what it would."""

from pathlib import Path

import pytest

from skyrl_train.utils.gpu_monitor import GpuMonitor, load_metrics, measure_host_memory, start_monitor


def script(folder: Path, lines: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_monitor_returns_mean_since_last_call(tmp_path: Path):
    count = tmp_path / "count"
    lines = [f"echo x >> {count}", f'echo "$(($(wc -l < {count}) * 10)), 1024"', f'echo "$@" > {count}.args']
    program = script(tmp_path, "\n".join(lines))
    monitor = GpuMonitor("GPU-7", program)
    assert monitor.get_means() == {}
    assert monitor.sample()
    assert monitor.sample()
    load = monitor.get_means()
    assert load["gpu_utilization_percent"] == 15.0
    assert load["gpu_memory_gb"] == pytest.approx(1.073741824)
    assert monitor.get_means() == {}
    assert (tmp_path / "count.args").read_text().split()[:2] == ["-i", "GPU-7"]


@pytest.mark.parametrize("lines", ["exit 9", "echo [N/A], 1024", "echo"])
def test_monitor_records_no_sample_when_program_fails(tmp_path: Path, lines: str):
    assert not GpuMonitor("GPU-7", script(tmp_path, lines)).sample()


def test_monitor_is_not_started_without_gpu_or_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert start_monitor(None) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start_monitor("7") is None


def test_host_memory_is_below_machine_memory():
    assert 0 < measure_host_memory()["host_memory_gb"] < 100_000


def test_metrics_have_mean_and_maximum_over_ranks():
    ranks = [{"gpu_utilization_percent": 20.0}, {"gpu_utilization_percent": 60.0}]
    assert load_metrics(ranks) == {
        "gpu/rank_0/gpu_utilization_percent": 20.0,
        "gpu/rank_1/gpu_utilization_percent": 60.0,
        "gpu/mean_gpu_utilization_percent": 40.0,
        "gpu/max_gpu_utilization_percent": 60.0,
    }
    assert load_metrics([{}, {}]) == {}
    assert load_metrics([{}, ranks[1]])["gpu/mean_gpu_utilization_percent"] == 60.0
