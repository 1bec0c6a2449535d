"""The GPU day's script: every section has figures, or the reason why it has none."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "benchmarks" / "gpu_day.py"
ON_CPU = ["machine", "trainer", "weight_sync", "offload", "grpo", "engine_speed", "engine_checks", "backend_checks"]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_day", module)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "preload", lambda: None)
    return module


@pytest.mark.slow
def test_tiny_cpu_run_has_figures_in_all_sections(run_script: Callable[..., str], tmp_path: Path):
    output = tmp_path / "gpu_day.json"
    run_script(str(SCRIPT), "--device", "cpu", "--tiny", "--budget", "2400", "--output", str(output))
    sections = json.loads(output.read_text())["sections"]
    assert [name for name, section in sections.items() if section.get("ok")] == ON_CPU
    assert all(section.get("ok") or section["skipped"] for section in sections.values())
    assert sections["engine_checks"]["found"]["passed"] == 5
    grpo = sections["grpo"]["found"]
    assert (grpo["samples"], grpo["tokens"], grpo["new_tokens"]) == (8, 8 * (8 + 8), 8 * 8)
    assert grpo["log_probs_differ"]["max"] < 1e-4 < grpo["grad_norm"]
    assert grpo["measured_gb"]["memory/policy_train_peak_gb"] > 0 < grpo["estimated_gb"]["train policy"]
    assert list(sections["engine_speed"]["found"]) == ["4", "1"]
    trainer = sections["trainer"]["found"]
    for speed in (grpo["generation"], grpo["training"], trainer["full"], trainer["lora"]):
        assert 0 < speed["mfu"] < 1 and speed["tokens_per_second"] > 0
    assert sections["weight_sync"]["found"]["bytes"] == 2**20
    assert sections["offload"]["found"]["bytes"] == 3 * 4 * grpo["weight_sync"]["bytes"] / 4


def test_prompts_of_other_length_fail(gpu_day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = gpu_day.Bench("cpu", "float32", gpu_day.TINY, tmp_path)
    prompts = Path(gpu_day.settings(bench)["data"]["train_data"][0])
    assert len(prompts.read_text().splitlines()) == gpu_day.TINY.num_prompts * gpu_day.TINY.num_steps
    monkeypatch.setattr(gpu_day, "NUM_TEMPLATE_TOKENS", 4)
    with pytest.raises(AssertionError, match="9"):
        gpu_day.settings(bench)


def run_sections(gpu_day: Any, folder: Path, sections: dict[str, Any], *arguments: str) -> tuple[int, dict[str, Any]]:
    gpu_day.SECTIONS = sections
    output = folder / "gpu_day.json"
    status = gpu_day.main(["--device", "cpu", "--tiny", "--output", str(output), *arguments])
    return status, json.loads(output.read_text())["sections"]


def test_failed_section_is_written_and_others_run(gpu_day: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def fail(bench: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel image is available")

    sections = {
        "broken": gpu_day.Section(fail, 20),
        "hangs": gpu_day.Section(lambda bench: time.sleep(250), 0.05),
        "well": gpu_day.Section(lambda bench: {"figure": 1.0}, 20),
    }
    status, found = run_sections(gpu_day, tmp_path, sections)
    assert status == 1
    assert not found["broken"]["ok"] and found["broken"]["error"][-1] == "RuntimeError: no kernel image is available"
    assert not found["hangs"]["ok"] and found["hangs"]["error"][0].startswith("did not end within 0.2 s")
    assert found["well"]["ok"] and found["well"]["found"] == {"figure": 1.0}
    captured = capfd.readouterr()
    assert "broken: FAILED" in captured.out and "Timeout" in captured.err


def test_section_without_time_or_package_is_skipped(gpu_day: Any, tmp_path: Path):
    well = gpu_day.Section(lambda bench: {}, 5)
    sections = {
        "machine": well,
        "short": well,
        "long": replace(well, seconds=500),
        "absent": replace(well, needs=("no_such_package",)),
        "gpu": replace(well, on_cpu=False),
    }
    status, found = run_sections(gpu_day, tmp_path, sections, "--budget", "60")
    assert status == 0 and found["short"]["ok"]
    assert "2000" in found["long"]["skipped"] and "no_such_package" in found["absent"]["skipped"]
    assert "--sections" in found["gpu"]["skipped"]
    status, found = run_sections(gpu_day, tmp_path, sections, "--sections", "gpu")
    assert status == 0 and list(found) == ["machine", "gpu"] and found["gpu"]["ok"]
