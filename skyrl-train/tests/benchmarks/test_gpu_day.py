"""The GPU day's script: every section has figures or the reason why not, and needs neither Ray nor other engines."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.entrypoints.model_files import load_tokenizer

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "benchmarks" / "gpu_day.py"
WITHOUT = ("ray", "vllm", "sglang", "deepspeed", "megatron", "trl", "datasets")


def run_python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=280
    )


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_day", module)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_tiny_cpu_run_has_figures_in_all_sections(tmp_path: Path):
    output = tmp_path / "gpu_day.json"
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({WITHOUT!r}))\n"  # importing one of them is an error now
        f"sys.argv = [{str(SCRIPT)!r}, '--device', 'cpu', '--tiny', '--output', sys.argv[1]]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    finished = run_python(code, str(output))
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    sections = json.loads(output.read_text())["sections"]
    assert list(sections) == ["machine", "engine_checks", "backend_checks", "grpo", "engine_speed"]
    assert all(section["ok"] and section["section_seconds"] > 0 for section in sections.values())
    assert sections["engine_checks"]["found"] == {"float32": {"passed": 4, "lacks": 0, "failed": 0}}
    grpo = sections["grpo"]["found"]
    assert (grpo["samples"], grpo["tokens"]) == (8, 8 * (8 + 8))
    assert grpo["log_probs_differ"]["max"] < 1e-4 < grpo["grad_norm"]
    assert grpo["seconds"]["sync_weights"] > 0 and grpo["memory"]["memory/policy_train_peak_gb"] > 0
    assert grpo["weight_sync"]["weight_sync/bytes"] == 4 * grpo["parameters"]
    assert grpo["generated_tokens_per_second"] > 0 < grpo["trained_tokens_per_second"]
    assert list(sections["engine_speed"]["found"]["tokens_per_second_by_requests"]) == ["1", "4"]


def test_prompts_have_counted_tokens(gpu_day: Any, tmp_path: Path):
    bench = gpu_day.Bench("cpu", "float32", gpu_day.TINY, tmp_path)
    prompts = gpu_day.settings(bench)["data"]["train_data"]
    tokenizer = load_tokenizer(gpu_day.model_folder(bench))
    dataset = PromptDataset(prompts, tokenizer, gpu_day.TINY.prompt_tokens, cache_dir=str(tmp_path / "cache"))
    assert len(dataset) == gpu_day.TINY.num_prompts * gpu_day.TINY.num_steps
    ids = tokenizer.apply_chat_template(dataset[0][0], add_generation_prompt=True, return_dict=False)
    assert len(ids) == gpu_day.TINY.prompt_tokens


def test_failed_section_is_written_and_others_run(gpu_day: Any, tmp_path: Path, capsys):
    def broken(bench: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel image is available")

    def well(bench: Any) -> dict[str, Any]:
        return {"figure": 1.0}

    output = tmp_path / "gpu_day.json"
    arguments = ["--device", "cpu", "--tiny", "--output", str(output)]
    gpu_day.SECTIONS = (broken, well)
    assert gpu_day.main(arguments) == 1
    found = json.loads(output.read_text())["sections"]
    assert not found["broken"]["ok"] and found["broken"]["error"][-1] == "RuntimeError: no kernel image is available"
    assert found["well"]["ok"] and found["well"]["found"] == {"figure": 1.0}
    assert "broken: FAILED" in capsys.readouterr().out
    gpu_day.SECTIONS = (well,)
    assert gpu_day.main(arguments) == 0


def test_hanging_section_ends_at_limit(tmp_path: Path):
    output = tmp_path / "gpu_day.json"
    code = (
        "import runpy, sys, time\n"
        f"names = runpy.run_path({str(SCRIPT)!r})\n"
        "def hangs(bench): time.sleep(250)\n"
        "names['run'].__globals__['SECTIONS'] = (hangs,)\n"
        "names['main'](['--device', 'cpu', '--tiny', '--limit', '0.2', '--output', sys.argv[1]])"
    )
    finished = run_python(code, str(output))
    assert finished.returncode == 1 and "in hangs" in finished.stderr
    section = json.loads(output.read_text())["sections"]["hangs"]
    assert not section["ok"] and section["error"][0].startswith("did not end within 0.2 s")
