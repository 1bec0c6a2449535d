"""`tx doctor` and `tx version`."""

import json
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tx import __version__
from tx.run import doctor
from tx.run.main import app


@pytest.fixture
def options(tmp_path) -> list[str]:
    return ["--state-dir", str(tmp_path / "state"), "--checkpoints-base", str(tmp_path / "checkpoints"), "--port", "0"]


def lines_of(text: str) -> dict[str, list[str]]:
    """Verdict -> subjects and findings."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        verdict, _, rest = line.partition(" ")
        found.setdefault(verdict, []).append(rest.strip())
    return found


def test_doctor_has_nothing_to_say_if_all_is_well(tiny_model, options, capsys):
    assert doctor.main(["--base-model", str(tiny_model), *options]) == 0
    found = lines_of(capsys.readouterr().out)
    assert "wrong" not in found
    assert any("Qwen3ForCausalLM, vocabulary 99, context 512" in text for text in found["ok"])


def test_doctor_counts_packed_cpu_weights(tiny_model, options, capsys, monkeypatch):
    sizes = [tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values()]
    free = 4 * sum(sizes) + 1000  # enough for the weights alone
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    for settings, verdict in (({"device": "cpu"}, "note"), ({"device": "cpu", "dtype": "bfloat16"}, "ok")):
        assert doctor.main(["--base-model", str(tiny_model), *options, "--backend-config", json.dumps(settings)]) == 0
        assert any("their packed copy" in text for text in lines_of(capsys.readouterr().out)[verdict]), settings


def test_doctor_names_unreadable_weight_files(tiny_model, tmp_path, options, capsys):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    save_file({"scale": torch.tensor(1.0)}, model / "scale.safetensors")
    assert doctor.main(["--base-model", str(model), *options]) == 0, "a number is a tensor, too"
    assert any("their packed copy" in text for text in lines_of(capsys.readouterr().out)["ok"])
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(100)
    (model / "scale.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3\n")
    (model / "empty.safetensors").touch()
    assert doctor.main(["--base-model", str(model), *options]) == 1
    found = lines_of(capsys.readouterr().out)
    for name in ("model", "scale", "empty"):
        assert any(f"{model / name}.safetensors cannot be read" in text for text in found["wrong"])
    assert all("git lfs pull" in text for text in found["wrong"])
    assert any(text.startswith("database") for text in found["ok"]), "the table continues"


def test_doctor_reports_all_problems_with_remedies(tmp_path, options, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "state").write_text("a file where a folder should be")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        model = ["--base-model", str(tmp_path / "model")]
        backend = ["--backend", "skyrl_train", "--backend-config", '{"num_proceses": 2}']
        keys = ["--api-keys-file", str(tmp_path / "none")]
        assert doctor.main([*model, *options, *backend, *keys, "--port", port]) == 1
    wrong = lines_of(capsys.readouterr().out)["wrong"]
    for subject in ("API keys", "backend", "base model", "port", "state folder", "database"):
        assert any(text.startswith(subject) for text in wrong), subject
    assert any("choose another --port" in text for text in wrong)


def test_doctor_without_model_checks_rest(options, capsys):
    assert doctor.main(options) == 0
    assert any("set --base-model" in text for text in lines_of(capsys.readouterr().out)["note"])


def test_doctor_reports_run_folders_above_limit(tmp_path, options, capsys):
    logs = tmp_path / "state" / "runs" / "s_train_0" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "config.yaml").write_text('{"tinker": {}}')
    (logs / "trainer.log").write_bytes(b"\n" * 2986)
    for most, verdict in (("4e-6", "ok"), ("2e-6", "note")):
        assert doctor.main([*options, "--max-runs-gb", most]) == 0
        found = lines_of(capsys.readouterr().out)[verdict]
        assert any(
            text.startswith("run folders") and f"1 take 3e-06 GB; --max-runs-gb is {most[0]}" in text for text in found
        )


def test_doctor_wrong_option_is_error_not_finding(capsys):
    assert doctor.main(["--prot", "1"]) == 2
    assert "did you mean --port" in capsys.readouterr().err


def test_doctor_prints_version_and_refuses_unknown_options():
    run = CliRunner().invoke
    assert run(app, ["version"]).output == f"tx v{__version__}\n"
    assert run(app, ["train", "--modle", "x"]).exit_code == 2
    needed = ["--model", "x", "--dataset", "d.jsonl", "--output-dir", "o", "--batch-size", "1"]
    refused = run(app, ["train", *needed, "--optimizer", "sgd"])
    assert "--optimizer must be adamw" in str(refused.exception)


def test_doctor_makes_no_tables_in_postgresql(postgres, postgres_url, options, capsys):
    database = ["--database-url", postgres_url]
    doctor.main([*options, *database])
    assert "PostgreSQL answers; the server creates its tables at startup" in capsys.readouterr().out
    assert postgres.run("SELECT 1 FROM pg_tables WHERE schemaname = 'public'", postgres_url.split("?")[0][-11:]) == []
    assert doctor.main([*options, *database, "--integrity"]) == 1
