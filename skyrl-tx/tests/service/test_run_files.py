"""Run folders of models, as the dashboard reads them."""

import asyncio
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from skyrl_inspect.dashboard.catalog import Catalog
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.steps import StepTrajectories
from skyrl_inspect.defaults import Defaults
from tx.tinker.commands import Sample, Save, SaveEffect, StoredCommand
from tx.tinker.service import kept_samples, run_files
from tx.tinker.service.kept_samples import KeptSamples
from tx.tinker.service.run_files import RunFiles
from tx.tinker.service.run_folders import remove_oldest, run_folders
from tx.tinker.service.state import PendingRequest, Run
from tx.tinker.texts import Texts
from tx.tinker.types import LoraSpec, SampleOutput, SampleParams, SampleSpec, Sequence
from tx.tinker.wire.codec import encode_sample_output

RUN = Run("s:train:0", "alice", "s", "tiny", LoraSpec(rank=8, seed=3))
SAVE = Save(request_id="r", tenant="alice", model_id=RUN.model_id, seq=1, folder="f", state=True)


def pending(kind: str, run: Run | None = RUN) -> PendingRequest:
    stored = StoredCommand(command=SAVE, save=SaveEffect(kind="weights", name="mine") if kind == "save" else None)
    return PendingRequest("r", "alice", kind, stored, run=run)


def passes(loss: float, targets: float, ratio: float) -> dict[str, float]:
    return {"loss:sum": loss, "targets:sum": targets, "ratio:mean": ratio}


def rows(folder: Path) -> list[dict]:
    lines = (folder / "s_train_0" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


async def test_model_curves_continue_after_restart(tmp_path: Path):
    files = RunFiles(tmp_path)
    files.done(pending("create"), {})
    files.done(pending("train"), passes(6.0, 3.0, 1.0))
    files.done(pending("train"), passes(2.0, 1.0, 2.0))
    files.done(pending("sample", None), {"tokens": 5.0}, RUN.model_id)
    files.done(pending("optimize"), {"grad_norm:mean": 0.5})
    files.failed(pending("train"), "bad\n2026-01-01 00:00:00 ERROR    of a user", "user")
    files.close()
    [first] = rows(tmp_path)
    assert (first["step"], first["train/loss"], first["train/ratio:mean"]) == (1, 2.0, 1.25)
    assert (first["optimizer/grad_norm:mean"], first["sampler/requests"], first["sampler/tokens"]) == (0.5, 1, 5)

    with open(tmp_path / "s_train_0" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "ti')  # the server was killed
    again = RunFiles(tmp_path)
    again.done(pending("optimize"), {})
    again.done(pending("save"), {})
    catalog = Catalog(RunsFolder(tmp_path), Defaults())
    again.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    row = catalog.get_row("s_train_0")
    assert (row["name"], row["model"], row["seed"], row["step"], row["state"]) == ("s:train:0", "tiny", 3, 2, "running")
    assert row["curve"] == [[1], [2.0]]

    last = RunFiles(tmp_path)
    last.done(pending("unload"), {})
    last.close()
    assert catalog.get_row("s_train_0")["state"] == "finished"
    log = (tmp_path / "s_train_0" / "logs" / "trainer.log").read_text()
    assert "checkpoint saved: tinker://s:train:0/weights/mine" in log
    assert len(log.splitlines()) == 6  # an error of many lines is one


async def test_model_failing_creation_is_failed_run(tmp_path: Path):
    files = RunFiles(tmp_path)
    files.failed(pending("create"), "no memory", "server")
    files.close()
    row = Catalog(RunsFolder(tmp_path), Defaults())
    assert row.list_runs() == [], "it never became a run"
    log = (tmp_path / "s_train_0" / "logs" / "trainer.log").read_text()
    assert "ERROR    create r failed (server): no memory" in log


async def test_unwritable_run_folders_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "runs").write_text("a file")
    files = RunFiles(tmp_path / "runs")
    with caplog.at_level(logging.WARNING):
        files.done(pending("create"), {})
        files.done(pending("optimize"), {})
        files.close()
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


async def test_stalled_disk_does_not_block_exit(tmp_path: Path):
    (tmp_path / "s_train_0").mkdir()
    pipe = tmp_path / "s_train_0" / "config.yaml"
    os.mkfifo(pipe)  # writing waits for a reader
    files = RunFiles(tmp_path)
    files.done(pending("create"), {})
    files.done(pending("optimize"), {})
    files.close(0.01)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "run-files"]
    assert thread.daemon and not (tmp_path / "s_train_0" / "metrics.jsonl").exists()
    pipe.read_text()
    thread.join()
    assert [row["step"] for row in rows(tmp_path)] == [1]


async def test_model_log_is_rotated_when_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_files, "MODEL_LOG_BYTES", 1000)
    files = RunFiles(tmp_path)
    files.done(pending("create"), {})
    for _ in range(200):
        files.failed(pending("train"), "bad " * 20, "user")
        files.done(pending("optimize"), {})
    files.done(pending("unload"), {})
    files.close()
    logs = {path.name: path.stat().st_size for path in (tmp_path / "s_train_0" / "logs").iterdir()}
    assert set(logs) == {"trainer.log", "trainer.log.1"} and sum(logs.values()) < 2500
    row = Catalog(RunsFolder(tmp_path), Defaults()).get_row("s_train_0")
    assert (row["step"], row["state"]) == (200, "finished")


def sample(number: int, tenant: str = "alice") -> tuple[PendingRequest, bytes]:
    spec = SampleSpec(prompt=[40, 41, number], params=SampleParams(seed=0))
    stored = Sample.encode(f"s:sample:0:{number}", tenant, spec, "folder")
    sequences = [Sequence([50, 51 + number], [-0.5, -1.25], "length") for _ in range(2)]
    body = encode_sample_output(SampleOutput(sequences))
    return PendingRequest(f"s:sample:0:{number}", tenant, "sample", stored), body


async def test_latest_samples_of_step_are_bounded_for_dashboard(tiny_model: Path, tmp_path: Path):
    def keep(files: RunFiles, number: int, tenant: str = "alice") -> None:
        request, body = sample(number, tenant)
        files.done(request, {"tokens": 4.0}, RUN.model_id, body)

    texts = Texts(tiny_model)
    for begun in (True, False):  # the server is started again in between
        files = RunFiles(tmp_path, KeptSamples(4, 10_000, texts))
        if begun:
            files.done(pending("create"), {})
        for number in range(5 * (not begun), 5 + 5 * (not begun)):
            keep(files, number)
        keep(files, 30, "bob")  # who samples from weights that alice has published
        files.close()
    steps = StepTrajectories(RunsFolder(tmp_path))
    rows = steps.summary("s_train_0", "train", 0)["rows"]
    assert 4 <= len(rows) < 8 and rows[-1]["uid"] == "s:sample:0:9"
    assert not any(row["uid"] == "s:sample:0:30" for row in rows)
    assert (rows[-1]["sample"], rows[-1]["stop"], rows[-1]["tokens"]) == (1, "length", 2)
    last = json.loads(steps.row("s_train_0", "train", 0, len(rows) - 1))
    assert last["prompt"] == texts.decode([40, 41, 9]) and "".join(last["tokens"]["text"]) == last["response"]
    assert last["tokens"]["log_probs"] == [-0.5, -1.25]

    files = RunFiles(tmp_path, KeptSamples(4, 2_000, Texts(tmp_path)))  # no tokenizer there
    for _ in range(20):
        files.done(pending("optimize"), {})
        keep(files, 1)
    files.close()
    kept = list((tmp_path / "s_train_0" / "trajectories").iterdir())
    assert sum(path.stat().st_size for path in kept) <= 2_000
    assert max(path.name for path in kept) == "train_step_000020.jsonl" and len(kept) > 1


def test_stored_samples_are_private_and_full_file_is_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = []
    keep_last = kept_samples._remove_all_but_last
    monkeypatch.setattr(kept_samples, "_remove_all_but_last", lambda *args: written.append(1) or keep_last(*args))
    samples = KeptSamples(1000, 10_000, Texts(tmp_path))  # no tokenizer there
    for number in range(100):
        samples.add(tmp_path, 0, f"s:sample:0:{number}", [40, 41], SampleOutput([Sequence([50], [-0.5], "length")]))
    (file,) = (tmp_path / "trajectories").iterdir()
    assert file.parent.stat().st_mode & 0o077 == 0, "clients' data are not for other users of the machine"
    kept = [json.loads(line)["uid"] for line in file.read_text().splitlines()]
    assert kept == [f"s:sample:0:{number}" for number in range(100 - len(kept), 100)]
    assert 4_000 < file.stat().st_size <= 10_000
    assert 0 < len(written) < 10


async def test_samples_waiting_for_stalled_disk_are_bounded_and_recover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    request, body = sample(1)
    monkeypatch.setattr(run_files, "MOST_SAMPLE_BYTES", 3 * len(body))
    begun, goes_on, kept = threading.Event(), threading.Event(), []

    class Stalled(KeptSamples):
        def add(self, *args: object) -> None:
            kept.append(1)
            begun.set()
            assert goes_on.wait(30)

    files = RunFiles(tmp_path, Stalled(4, 10_000, Texts(tmp_path)))
    files.done(pending("create"), {})
    files.done(request, {}, RUN.model_id, body)
    assert begun.wait(30)
    for _ in range(10):
        files.done(request, {}, RUN.model_id, body)
    goes_on.set()
    while files._sample_bytes:
        await asyncio.sleep(0.01)
    assert len(kept) == 3
    files.done(request, {}, RUN.model_id, body)
    files.close()
    assert len(kept) == 4


async def test_oldest_run_folders_of_unloaded_models_are_removed_beyond_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = RunFiles(tmp_path, KeptSamples(4, 10_000, Texts(tmp_path)))
    runs = [Run(f"s:train:{number}", "alice", "s", "tiny", LoraSpec()) for number in range(4)]
    for run in runs:
        files.done(pending("create", run), {})
        request, body = sample(1)
        files.done(request, {"tokens": 4.0}, run.model_id, body)
    files.note({"sessions": 1.0})
    await asyncio.to_thread(wait_until_written, files)
    (tmp_path / "server" / "config.yaml").write_text('{"tinker": {}}')
    for age, number in enumerate((2, 0, 1, 3)):  # the server's folder is the newest
        for path in (tmp_path / f"s_train_{number}").rglob("*"):
            os.utime(path, (1000 + age, 1000 + age))
    sizes = {folder.path.name: folder.num_bytes for folder in run_folders(tmp_path)}
    assert list(sizes) == ["s_train_2", "s_train_0", "s_train_1", "s_train_3", "server"]
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "curves.jsonl").write_text("a user's own")
    with caplog.at_level(logging.INFO):
        files.limit(sum(sizes.values()) - sizes["s_train_2"] - 1, live=[runs[0].model_id])  # one byte too many
        for _ in range(3):
            files.limit(sizes["s_train_0"] + sizes["server"] - 1, live=[runs[0].model_id])
        files.done(request, {"tokens": 4.0}, runs[1].model_id, body)  # from a checkpoint of it
        files.close()
    assert {path.name for path in tmp_path.iterdir()} == {"s_train_0", "server", "archive"}
    removals = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [text.rpartition(": ")[2] for text in removals] == ["s_train_2, s_train_1", "s_train_3"]
    assert caplog.text.count("unload models, or raise the limit") == 1


def test_unremovable_run_folder_does_not_block_removal_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for age, name in enumerate(("first", "second", "third")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text('{"tinker": {}}')
        os.utime(tmp_path / name / "config.yaml", (1000 + age, 1000 + age))
    rmtree = shutil.rmtree

    def refuse_first(path: Path) -> None:
        if path.name == "first":
            raise PermissionError("refused")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse_first)
    found = remove_oldest(tmp_path, 14 * 2, live={"third"})
    assert found.removed == ["second"] and list(found.failed) == ["first"] and found.num_bytes == 14 * 2


def wait_until_written(files: RunFiles) -> None:
    written = threading.Event()
    files._submit(written.set)
    assert written.wait(30)


async def test_samples_are_not_kept_unless_asked_for(tmp_path: Path):
    files = RunFiles(tmp_path)
    request, body = sample(1)
    files.done(request, {"tokens": 4.0}, RUN.model_id, body)
    files.close()
    assert not (tmp_path / "s_train_0" / "trajectories").exists()
