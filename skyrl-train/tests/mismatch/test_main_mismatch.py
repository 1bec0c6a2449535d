"""The command: engines in processes of their own, a page, a JSON file, an exit code."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_gym.waits import recorded_run
from skyrl_inspect.mismatch.__main__ import (
    MismatchConfig,
    MismatchRunConfig,
    format_help,
    list_samplings,
    load_prompts,
    measure,
    validate_settings,
)
from skyrl_inspect.mismatch.answers import SAMPLINGS, Questions
from skyrl_inspect.mismatch.process import run_in_process
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine


def settings(model: str = "model", **sections: Any) -> MismatchRunConfig:
    trainer = {"policy": {"model": {"path": model}}, "placement": {"device": "cpu"}}
    return validate_settings(MismatchRunConfig.from_dict({"trainer": trainer, **sections}))


@pytest.mark.slow
def test_command_measures_in_order_and_exits_1_above_limit(sharp_model: str, tmp_path: Path):
    """bfloat16 rounds this model by 0.006, float32 by less than a millionth: a limit of 0.001 is between."""
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_mismatch"]
    command += [f"trainer.policy.model.path={sharp_model}", f"trainer.run_dir={tmp_path}", "trainer.bf16=false"]
    command += ["trainer.placement.device=cpu", "mismatch.engines=[native]", "mismatch.dtypes=[float32,bfloat16]"]
    command += ["mismatch.samplings=[temperature 1,top_p 0.9]", "mismatch.max_mean_difference=1e-3"]
    command += ["mismatch.num_prompts=10", "mismatch.max_tokens=8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 1, finished.stderr[-3000:]
    assert "above mismatch.max_mean_difference=0.001: native bfloat16" in finished.stdout
    report = json.loads((tmp_path / "mismatch.json").read_text())
    names = [(cell["engine"]["dtype"], cell["sampling"]["name"]) for cell in report["cells"]]
    ways = ["fixed tokens", "temperature 1", "top_p 0.9"]
    assert names == [(dtype, way) for dtype in ("float32", "bfloat16") for way in ways]
    for cell in report["cells"]:
        assert (cell["gap"]["mean"] < 1e-5) == (cell["engine"]["dtype"] == "float32")
        assert len(cell["worst_tokens"]) == 5
    assert [finding["kind"] for finding in report["findings"]] == ["number format"]
    assert len(report["limit"]["above"]) == 3


@pytest.mark.full
def test_unreachable_server_is_named_and_command_exits_1(sharp_model: str, tmp_path: Path):
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_mismatch"]
    command += [f"trainer.policy.model.path={sharp_model}", f"trainer.run_dir={tmp_path}"]
    command += ["generator.run_engines_locally=false", "generator.remote_inference_engine_urls=[127.0.0.1:1]"]
    command += ["trainer.placement.device=cpu", "trainer.placement.colocate_all=false"]
    command += ["mismatch.max_mean_difference=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 1, finished.stderr[-3000:]
    assert "no engine was measured" in finished.stdout
    [missing] = json.loads((tmp_path / "mismatch.json").read_text())["not_measured"]
    assert missing["what"] == "server at 127.0.0.1:1 unknown dtype"
    assert "cannot be reached" in missing["why"]
    assert "127.0.0.1:1" in missing["why"]


@pytest.mark.full
@pytest.mark.slow
def test_failing_engine_is_reported_with_log(tmp_path: Path):
    questions = Questions(prompts=[[1]], samplings=[SAMPLINGS["greedy"]], max_tokens=1)

    def asked(make_engine: Any, seconds: float) -> str:
        with pytest.raises(WorkerError) as caught:
            run_in_process(make_engine, questions, tmp_path / "engine.log", seconds)
        return str(caught.value)

    died = asked(partial(os._exit, 3), 120)
    assert "exit code 3" in died
    assert "=== process" in died  # the log's first line
    began = time.monotonic()
    with recorded_run(tmp_path / "waits", "trainer"):
        late = asked(partial(time.sleep, 600), 15)
    assert "no answer within 15 seconds: engine (pid " in late
    assert "does not finish the engine's start" in late
    assert time.monotonic() - began < 100
    assert "dtype must be one of" in asked(partial(NativeInferenceEngine, "none", dtype="float8"), 120)


def test_unknown_name_is_refused_with_known_names():
    with pytest.raises(ConfigError, match="top_p"):
        settings(mismatch={"samplings": ["top_p 0.8"]})
    with pytest.raises(ConfigError, match=r"mismatch\.dtypes"):
        settings(mismatch={"dtype": ["float32"]})
    with pytest.raises(ConfigError, match=r"mismatch\.max_tokens"):
        settings(mismatch={"max_tokens": 0})
    with pytest.raises(ConfigError, match=r"mismatch.dtypes\[0\]"):
        settings(mismatch={"dtypes": ["float8"]})
    with pytest.raises(ConfigError, match=r"trainer\.placement\.launcher=inline"):
        settings(trainer={"policy": {"model": {"path": "model"}}, "placement": {"device": "cpu", "launcher": "inline"}})


def test_training_sampling_is_measured_first_and_once():
    own = list_samplings(settings())
    assert [sampling.name for sampling in own][:2] == ["generator.sampling_params", "temperature 0.7"]
    other = list_samplings(settings(generator={"sampling_params": {"temperature": 0.9, "top_k": 5}}))
    assert other[0].params == {"temperature": 0.9, "top_k": 5}
    assert [sampling.name for sampling in other][1:] == list(SAMPLINGS)


def test_prompts_leave_room_for_responses_and_are_padded_randomly(sharp_model: str):
    """A context of 256 tokens: answers of 230 leave 26, and the built-in questions are longer, in characters."""
    cfg = settings(sharp_model, mismatch={"num_prompts": 12, "max_tokens": 230})
    from transformers import AutoTokenizer

    prompts = load_prompts(cfg, AutoTokenizer.from_pretrained(sharp_model))
    assert len(prompts) == 12
    assert max(map(len, prompts)) == 26
    assert min(map(len, prompts)) >= 1
    assert prompts == load_prompts(cfg, AutoTokenizer.from_pretrained(sharp_model))
    cfg.mismatch.max_tokens = 256
    with pytest.raises(ConfigError, match="no room for a prompt"):
        load_prompts(cfg, AutoTokenizer.from_pretrained(sharp_model))


def test_prompts_follow_configured_template(sharp_model: str, tmp_path: Path):
    from transformers import AutoTokenizer

    (tmp_path / "template.jinja").write_text("{{ note }}{{ messages[0].content[:4] }}")
    template = {"source": "file", "name_or_path": str(tmp_path / "template.jinja")}
    generator = {"chat_template": template, "chat_template_kwargs": {"note": "abc"}}
    tokenizer = AutoTokenizer.from_pretrained(sharp_model)
    prompts = load_prompts(settings(sharp_model, mismatch={"num_prompts": 2}, generator=generator), tokenizer)
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["abcWhat", "abcWrit"]


def test_help_describes_all_settings():
    text = format_help()
    for name in vars(MismatchConfig()):
        assert f"mismatch.{name}=" in text
    assert "the command ends with exit code 1" in text


def test_path_without_model_is_refused_in_one_line():
    cfg = validate_settings(MismatchRunConfig.from_dict({"trainer": {"policy": {"model": {"path": "/nowhere/model"}}}}))
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.path=/nowhere/model"):
        measure(cfg)
