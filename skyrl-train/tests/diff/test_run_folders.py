"""Comparison of folders as they are found: copied, cut off, empty, of earlier releases."""

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_inspect.diff import compare_runs
from skyrl_inspect.diff.__main__ import main
from skyrl_inspect.diff.effects import WITHOUT_EFFECT, get_effect, get_library_stages
from skyrl_inspect.diff.parting import StepPart, get_metric_stage
from skyrl_inspect.diff.text import format_page, format_text
from skyrl_train.checkpoints import CheckpointStore
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.fingerprint import flatten_settings
from skyrl_train.config.typed import list_setting_names
from skyrl_train.errors import DataError
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.token_columns import encode_columns

HOSTILE = "</li><script>alert(1)</script>\x1b[2J"


@pytest.mark.slow
def test_folder_compared_with_itself_is_bit_equal(base_run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(base_run), str(base_run)]) == 0
    text = capsys.readouterr().out
    assert "bit-equal up to step 8\n" in text
    assert "not compared" not in text


def test_copied_folder_is_bit_equal(base_run: Path, copy: Path):
    found = compare_runs(base_run, copy)
    assert found.are_equal
    assert (list(found.changes), list(found.causes)) == ([], [])


def test_missing_folder_is_refused(base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(base_run), str(tmp_path / "nowhere")]) == 2
    assert re.search(r"nowhere is not a folder.*trainer\.run_dir", capsys.readouterr().err)


def test_empty_folder_is_refused(base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path), str(base_run)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} is not a run folder: it has neither config.yaml nor metrics.jsonl" in error
    assert "Pass the folder of trainer.run_dir" in error


def test_run_before_first_step_is_compared_by_start_record(copy: Path, base_run: Path):
    for name in ("metrics.jsonl", "fingerprints.jsonl"):
        (copy / name).unlink()
    shutil.rmtree(copy / "trajectories")
    found = compare_runs(base_run, copy)
    assert found.verdict == "B has no step yet: only settings and versions are compared"
    assert not found.are_equal
    assert main([str(base_run), str(copy)]) == 2


def test_running_run_is_compared_up_to_last_step(copy: Path, base_run: Path):
    """Killed while it wrote step 6: its trajectories are there, the lines of its numbers are torn."""
    for name in ("metrics.jsonl", "fingerprints.jsonl"):
        lines = (copy / name).read_bytes().splitlines(keepends=True)
        end = next(index for index, line in enumerate(lines) if json.loads(line)["step"] == 6)
        (copy / name).write_bytes(b"".join(lines[:end]) + lines[end][:50])
    for step in (7, 8):
        (copy / f"trajectories/train_step_{step:06d}.jsonl").unlink()
    found = compare_runs(base_run, copy)
    assert found.are_equal
    assert found.verdict == "bit-equal up to step 6, the last step of both (A has 8, B 6)"


def test_broken_line_is_named(copy: Path, base_run: Path):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        compare_runs(base_run, copy)
    (copy / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1 .*`step`"):
        compare_runs(base_run, copy)


def test_broken_configuration_is_named(copy: Path, base_run: Path):
    (copy / "config.yaml").write_text("trainer: [")
    with pytest.raises(DataError, match=r"config\.yaml"):
        compare_runs(base_run, copy)


def test_folder_without_records_is_compared_by_available_files(copy: Path, base_run: Path, edit_lines: Any):
    for name in ("starts.jsonl", "fingerprints.jsonl"):
        (copy / name).unlink()
    shutil.copy(copy / "config.yaml", copy / "config_1.yaml")
    with CheckpointStore(copy / "ckpts").writing(8) as draft:
        (draft.folder / "provenance.json").write_text(json.dumps({"data": "16 rows (0123456789ab)", "settings": {}}))

    def leave_out(row: dict[str, Any]) -> None:
        del row["prompt_ids"], row["tokens"]["weight_versions"]

    for step in range(1, 9):
        edit_lines(copy / f"trajectories/train_step_{step:06d}.jsonl", leave_out)
    found = compare_runs(base_run, copy)
    assert found.are_equal
    text = format_text(found)
    for words in (
        "B has no starts.jsonl",
        "B has no fingerprints of weights",
        "B was started earlier with other settings",
    ):
        assert words in text
    assert [(change.name, str(change.b)) for change in found.changes] == [("training data", "16 rows (0123456789ab)")]


def test_unrecorded_cause_is_reported(copy: Path, base_run: Path, edit_lines: Any):
    (copy / "starts.jsonl").unlink()
    edit_lines(copy / "trajectories/train_step_000002.jsonl", lambda row: row.update(prompt=row["prompt"] + " now"))
    found = compare_runs(base_run, copy)
    assert [cause.name for cause in found.causes[:2]] == ["training data", "tokenizer"]
    assert all("not recorded by both" in cause.change for cause in found.causes[:2])


def test_first_differing_token_of_column_is_named(copy: Path, base_run: Path, edit_lines: Any):
    path = RunFolder(copy).token_columns_path(3)
    lines = path.read_bytes().splitlines()
    row = json.loads(lines[5])
    log_probs = np.frombuffer(base64.b64decode(row["trainer_log_probs"]), dtype="<f4").copy()
    log_probs[2] -= 0.5
    lines[5] = json.dumps(row | encode_columns({"trainer_log_probs": log_probs})).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")

    def other_hash(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            hashes = row["batch"]["hashes"]
            hashes["action_log_probs"] = hashes["action_log_probs"][:40] + "0" * 8 + hashes["action_log_probs"][48:]

    edit_lines(copy / "fingerprints.jsonl", other_hash)
    said = re.search(
        r"of sample 5 .*first in token 2: (\S+) against (\S+)\)", format_text(compare_runs(base_run, copy))
    )
    assert said and float(said[1]) - float(said[2]) == pytest.approx(0.5, abs=1e-6)


def test_runs_without_trajectories_are_compared_by_metrics(copy: Path, base_run: Path, edit_lines: Any):
    shutil.rmtree(copy / "trajectories")
    edit_lines(
        copy / "metrics.jsonl",
        lambda row: row.update({"reward/avg_raw_reward": 0.5}) if row["step"] == 5 else None,
    )
    found = compare_runs(base_run, copy)
    assert found.verdict.startswith("equal up to step 4; first difference: reward/avg_raw_reward of step 5: ")
    assert any(
        "B has no trajectories (trainer.dump_trajectories=true writes them)" in line for line in found.unrecorded
    )


def test_difference_without_cause_is_reported(copy: Path, base_run: Path, edit_lines: Any):
    edit_lines(copy / "trajectories/train_step_000003.jsonl", lambda row: row.update(reward=0.0, stop_reason="stop"))
    found = compare_runs(base_run, copy)
    assert found.causes[0].name == "nothing recorded"


def test_damaged_engine_is_distinguished_from_damaged_policy(copy: Path, base_run: Path, edit_lines: Any):
    """Equal weights were sent, and one engine's log-probs are far from its trainer's."""

    def shift(row: dict[str, Any]) -> None:
        row["tokens"]["log_probs"] = [value - 0.01 for value in row["tokens"]["log_probs"]]

    edit_lines(copy / "trajectories/train_step_000003.jsonl", shift)
    name = "policy/rollout_train_logprobs_abs_diff_max"
    edit_lines(copy / "metrics.jsonl", lambda row: row.update({name: 0.01}) if row["step"] == 3 else None)
    found = compare_runs(base_run, copy)
    assert found.causes[0].name == "weights in the engine of B"
    assert "rollout log-prob of token 0 of sample 0" in found.verdict


def test_page_and_text_escape_run_contents(copy: Path, base_run: Path, edit_lines: Any, tmp_path: Path):
    edit_lines(copy / "starts.jsonl", lambda row: row["libraries"].update(torch=HOSTILE))
    edit_lines(copy / "trajectories/train_step_000001.jsonl", lambda row: row.update(prompt=HOSTILE))
    found = compare_runs(base_run, copy)
    assert "\x1b" not in format_text(found)
    page = format_page(found)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page


def test_command_writes_page_and_json(copy: Path, base_run: Path, tmp_path: Path, edit_lines: Any, capsys: Any):
    edit_lines(copy / "metrics.jsonl", lambda row: row.update({"policy/grad_norm": 1.0}) if row["step"] == 4 else None)
    page = tmp_path / "diff.html"
    assert main([str(base_run), str(copy), "--json", "--html", str(page)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["equal_up_to"], data["equal"]) == (3, False)
    assert [each["quantity"] for each in data["differences"]] == ["policy/grad_norm"]
    assert data["verdict"].startswith("equal up to step 3; first difference: policy/grad_norm of step 4")
    assert "equal up to step 3" in page.read_text()


# ---- the table of effects


def test_table_of_effects_names_existing_settings():
    known = set(list_setting_names(SkyRLConfig))
    assert [name for name in WITHOUT_EFFECT if name not in known] == []


def test_settings_all_have_effect_entry():
    """A setting that the table does not know would count as a cause of anything."""
    unknown = [
        name
        for name in flatten_settings(SkyRLConfig())
        if name not in WITHOUT_EFFECT and len(get_effect(name).stages) == len(StepPart)
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "name, stage",
    [
        ("timing/step", None),
        ("weight_sync/send_seconds", None),
        ("policy/policy_lr", StepPart.UPDATE),
        ("policy/rollout_train_kl_k3", StepPart.SCORES),
        ("eval/all/avg_score", StepPart.EVALUATION),
        ("reward/avg_raw_reward", StepPart.ENVIRONMENT),
    ],
)
def test_stage_of_metric(name: str, stage: StepPart | None):
    assert get_metric_stage(name) == stage


@pytest.mark.parametrize(
    "library, stage",
    [("torch", StepPart.SCORES), ("vllm", StepPart.GENERATION), ("megatron-core", StepPart.UPDATE), ("rich", None)],
)
def test_libraries_map_to_stages(library: str, stage: StepPart | None):
    stages = get_library_stages(library)
    assert stage in stages if stage is not None else stages == ()


def test_restarted_run_is_bit_equal_to_uninterrupted_run(train: Callable[..., Path], base_run: Path, tmp_path: Path):
    for last in (2, 3):
        train(tmp_path / "b", {"trainer": {"max_training_steps": last, "ckpt_interval": 1}})
    found = compare_runs(base_run, tmp_path / "b")
    assert found.verdict == "bit-equal up to step 3, the last step of both (A has 8, B 3)"
