"""Estimates of memory agree with measured peaks of rank processes, most within 15 %."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_estimates.py"
SLOW = ("FSDP2, a copy on each rank (fsdp_size=1)",)
LESS_EXACT = {"FSDP2, adapters of rank 16": 0.5, "Megatron, tensor parallel": 0.2}
"""Setting -> difference where the estimate is off by more than 15 %. The causes are not known (docs/benchmarks.md)."""


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("memory_estimates", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = sys.modules["memory_estimates"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # pyright: ignore[reportPrivateImportUsage]
    return module


BENCH = _benchmark()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and logs of all settings."""
    return tmp_path_factory.mktemp("memory")


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=pytest.mark.slow if each.name in SLOW else pytest.mark.full) for each in BENCH.SETTINGS],
    ids=lambda each: each.name,
)
def test_estimate_agrees_with_measured_peak(setting: Any, folder: Path):
    found = BENCH.compare(setting, folder)
    assert found.ratio == pytest.approx(1.0, abs=LESS_EXACT.get(setting.name, 0.15)), BENCH.row_of(found)
