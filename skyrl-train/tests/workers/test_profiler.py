"""Profile of a rank over training steps."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.models import TorchProfilerConfig
from skyrl_train.config.rules.run import check_profiler
from skyrl_train.errors import ConfigError
from skyrl_train.workers.profiler import StepProfiler, create_profiler

CPU = torch.device("cpu")


def profiled_steps(folder: Path, num_steps: int, **settings: Any) -> list[str]:
    """Return the names of the files that a profile of `num_steps` steps writes."""
    profiler = StepProfiler(TorchProfilerConfig(enable=True, **settings), folder, 3, CPU)
    for step in range(1, num_steps + 1):
        torch.ones(8, 8).matmul(torch.ones(8, 8))
        profiler.end_step(step)
    profiler.close()
    return sorted(path.name for path in folder.glob("*"))


def test_profiler_writes_trace_of_scheduled_step(tmp_path: Path):
    [name] = profiled_steps(tmp_path, 6, skip_first=1, wait=1, warmup=1, active=1, repeat=1)
    assert name == "rank_3_step_000004.json.gz"
    events = json.loads(gzip.decompress((tmp_path / name).read_bytes()))["traceEvents"]
    matmuls = [event for event in events if event["name"] == "aten::matmul"]
    assert len(matmuls) == 1
    assert matmuls[0]["args"]["Input Dims"] == [[8, 8], [8, 8]]


def test_profiler_repeats_cycles_until_limit(tmp_path: Path):
    names = profiled_steps(tmp_path, 7, skip_first=0, warmup=1, active=1, repeat=3, with_stack=False)
    assert names == [f"rank_3_step_{step:06d}.json.gz" for step in (2, 4, 6)]


def test_profiler_writes_stacks(tmp_path: Path):
    [name] = profiled_steps(tmp_path, 2, skip_first=0, warmup=1, export_type="stacks")
    assert name == "rank_3_step_000002.stacks"
    assert "test_profiler.py" in (tmp_path / name).read_text()


def config(**settings: Any) -> SkyRLConfig:
    return SkyRLConfig.from_dict({"trainer": {"policy": {"torch_profiler_config": {"enable": True, **settings}}}})


def test_profiler_is_created_on_selected_ranks(tmp_path: Path):
    cfg = config(ranks=[1])
    cfg.trainer.run_dir = str(tmp_path)
    assert create_profiler(cfg, 0, CPU) is None
    profiler = create_profiler(cfg, 1, CPU)
    assert profiler is not None
    profiler.close()
    cfg.trainer.policy.torch_profiler_config.enable = False
    assert create_profiler(cfg, 1, CPU) is None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"ranks": []}, r"ranks=\[\] must name ranks of the policy"),
        ({"ranks": [0, 1]}, "from 0 to 0"),
        ({"active": 0}, "active must be 1 or greater"),
        ({"skip_first": -1}, "skip_first"),
        ({"activities": []}, r"activities=\[\] records nothing"),
        ({"export_type": "stacks", "with_stack": False}, "needs .*with_stack=true"),
    ],
)
def test_impossible_profile_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check_profiler(config(**settings))
