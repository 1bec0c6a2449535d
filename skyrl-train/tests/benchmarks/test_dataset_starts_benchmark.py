"""The benchmark of a run's start over its data, with its starts in this process: same rows pass, others are told."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from loguru import logger

PATH = Path(__file__).parents[3] / "benchmarks" / "dataset_starts.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The benchmark's module."""
    spec = importlib.util.spec_from_file_location("dataset_starts_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))  # a start sets it: undone with this
    monkeypatch.setattr(module, "start", lambda _code, arguments: module.measure(*arguments))
    words = module.passages()[:4000]  # less to train a tokenizer on
    monkeypatch.setattr(module, "passages", lambda: words)
    yield module
    logger.enable("skyrl_train")


def test_starts_of_both_kinds_are_measured_and_compared(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    options = ["--rows", "40", "--tokens", "60", "--directory", str(tmp_path)]
    assert benchmark.main(options) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"\| (\w+) \| (\w+) \| [\d.]+ \| [\d.]+ \| [\d.-]+ \| [\d.-]+ \| [\d.]+ \|", printed)
    assert rows == [(kind, name) for kind in ("prompts", "examples") for name in ("cold", "warm")]
    assert "40 rows of 60 tokens" in printed and "All starts have the same rows." in printed
    assert list(tmp_path.iterdir()) == []

    digests = iter("ab")
    costs = {"seconds": 0.0, "cpu_seconds": 0.0, "peak": 0, "peak_with_files": 0}
    monkeypatch.setattr(benchmark, "start", lambda *_: costs | {"digest": next(digests)})
    assert benchmark.main([*options, "--kinds", "prompts"]) == 1
    assert "Starts have DIFFERENT rows." in capsys.readouterr().out
