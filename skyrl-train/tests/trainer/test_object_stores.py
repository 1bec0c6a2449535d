"""Checkpoints in an object store are whole or absent, and each machine downloads one once. The store is a server of
Amazon's protocol on this machine, or fsspec's in memory."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fsspec
import pytest
from async_runs import assert_equal_runs, fork_server, steps_of, train
from ray import cloudpickle

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.checkpoint_saver import CheckpointSaver
from skyrl_train.checkpoints import Checkpoint, CheckpointStore, list_checkpoint_dirs, verify
from skyrl_train.config import SkyRLConfig, TrainerConfig, get_config_as_dict
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.training_backends.checkpoint import WrittenFiles
from skyrl_train.training_run import load_group
from skyrl_train.utils import shared_download
from skyrl_train.utils.io import FileRecord, compute_sha256
from skyrl_train.utils.storage import (
    list_names,
    list_sizes,
    location,
    publishing,
    read_text,
    replace_file,
    write_durably,
)
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.object_store import ObjectStore
from skyrl_train_testing.rank_processes import ForkedRanks


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL of fsspec's store in memory, which is emptied."""
    yield "memory://bucket/ckpts"
    empty_memory()


def empty_memory() -> None:
    files = fsspec.filesystem("memory")
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


def write(store: CheckpointStore, step: int, content: bytes = b"weights") -> None:
    """Write a checkpoint with a file of the driver and one of a rank."""
    with store.writing(step) as draft:
        (draft.folder / "state.json").write_text(json.dumps({"step": step}))
        write_durably(draft.shared / "policy" / "rank_0", content)
        draft.add("policy", [WrittenFiles("node-a", {"rank_0": record_of(content)})])


def record_of(content: bytes) -> FileRecord:
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    path = folder / f"content_{os.getpid()}"
    path.write_bytes(content)
    try:
        return FileRecord(len(content), compute_sha256(path))
    finally:
        path.unlink()


def steps_in(root: str) -> list[str]:
    return [folder.name for folder in list_checkpoint_dirs(root)]


def latest(path: str | None = None) -> TrainerConfig:
    return TrainerConfig(resume_mode="from_path" if path else "latest", resume_path=path)


def local_files(checkpoint: Checkpoint) -> dict[str, int]:
    with checkpoint.local_copy(without=[]) as copy:
        return list_sizes(copy)


# ---- the store


def test_checkpoint_consists_of_files_and_manifest(memory: str):
    store = CheckpointStore(memory)
    assert store.find(latest()) is None
    for step in (9, 10, 100):
        write(store, step)
    assert steps_in(memory) == ["global_step_9", "global_step_10", "global_step_100"]
    assert read_text(location(memory) / "latest_ckpt_global_step.txt") == "100\n"
    found = store.find(latest())
    assert found is not None and str(found.folder) == f"{memory}/global_step_100"
    assert found.records_of("policy") == {"rank_0": record_of(b"weights")}
    assert local_files(found).keys() == {"state.json", "policy/rank_0"}
    with found.local_copy(without=["policy"]) as copy:
        assert list_sizes(copy).keys() == {"state.json"}, "files of a model are fetched by its ranks"


@pytest.mark.parametrize("error", [OSError("the store refuses"), KeyboardInterrupt()])
def test_failed_write_leaves_no_objects(memory: str, error: BaseException):
    store = CheckpointStore(memory)
    write(store, 1)
    with pytest.raises((CheckpointError, KeyboardInterrupt)), store.writing(2) as draft:
        write_durably(draft.shared / "policy" / "rank_0", b"x")
        raise error
    assert list_names(location(memory)) == ["global_step_1", "latest_ckpt_global_step.txt"]


def test_partial_upload_of_killed_run_is_hidden_and_deleted_at_next_write(memory: str):
    store = CheckpointStore(memory)
    write(store, 1)
    for name in ("global_step_2", "global_step_7", "superseded_global_step_9", "notes_of_the_user"):
        replace_file(location(memory) / name / "policy" / "rank_0", b"half")
    assert steps_in(memory) == ["global_step_1"]
    write(store, 2)
    assert steps_in(memory) == ["global_step_1", "global_step_2"]
    assert list_names(location(memory)) == [
        "global_step_1", "global_step_2", "latest_ckpt_global_step.txt", "notes_of_the_user",
    ]  # fmt: skip
    assert local_files(store.find(latest()) or pytest.fail()) == {"state.json": 11, "policy/rank_0": 7}


def test_checkpoint_is_not_sealed_when_rank_file_is_missing(memory: str):
    store = CheckpointStore(memory)
    refused = pytest.raises(CheckpointError, match="node-b wrote rank_0")
    with refused, store.writing(1) as draft:
        draft.add("policy", [WrittenFiles("node-b", {"rank_0": record_of(b"weights")})])
    assert list_names(location(memory)) == []


def test_old_checkpoints_are_removed_and_later_checkpoints_renamed(memory: str):
    store = CheckpointStore(memory, max_to_keep=3)
    for step in (1, 2, 3, 4):
        write(store, step)
    assert steps_in(memory) == ["global_step_2", "global_step_3", "global_step_4"]
    found = store.find(latest(f"{memory}/global_step_3"))
    assert found is not None
    store.rename_later(found.folder)
    assert steps_in(memory) == ["global_step_2", "global_step_3"]
    verify(f"{memory}/superseded_global_step_4")
    store.rename_later(None)
    assert steps_in(memory) == []


def test_kill_during_rename_leaves_complete_checkpoint(memory: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever the number of copies and deletions that were made."""
    files = type(fsspec.filesystem("memory"))
    for num_calls in range(8):
        empty_memory()
        store = CheckpointStore(memory)
        write(store, 1)
        left = iter([True] * num_calls)
        with monkeypatch.context() as patch:
            for name in ("cp_file", "rm_file", "rm"):
                stops(patch, files, name, left)
            with suppress(KeyboardInterrupt):
                store.rename_later(None)
        whole = [
            name for name in list_names(location(memory)) if "manifest.json" in list_names(location(memory) / name)
        ]
        assert whole, f"nothing is left after {num_calls} calls"
        for name in whole:
            verify(f"{memory}/{name}")


def stops(patch: pytest.MonkeyPatch, owner: Any, name: str, left: Iterator[bool]) -> None:
    """Let a method raise when `left` is used up."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if not next(left, False):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("policy/rank_0", b"weightz", r"policy/rank_0 is corrupted \(its hash differs\)"),
        ("policy/rank_0", b"weigh", r"policy/rank_0 is corrupted \(it has 5 bytes, expected 7\)"),
        ("state.json", b'{"step": 1}', r"state.json is corrupted \(its hash differs\)"),
        ("manifest.json", b"{", r"manifest.json cannot be read"),
    ],
)
def test_damaged_file_error_names_file_and_remedy(memory: str, name: str, content: bytes, words: str):
    store = CheckpointStore(memory)
    write(store, 1)
    write(store, 2)
    replace_file(location(memory) / "global_step_2" / name, content)
    with pytest.raises(CheckpointError, match=f"{words}.*trainer.resume_path={memory}/global_step_1"):
        local_files(store.find(latest()) or pytest.fail())


def test_export_replaces_config_last(memory: str):
    place = location(memory)
    for names in (["config.json", "old"], ["config.json", "new"]):
        with publishing(place, seal="config.json") as draft:
            for name in names:
                (draft.local / name).write_text("x")
    assert list_names(place) == ["config.json", "new"]


# ---- settings


@pytest.mark.first_case
@pytest.mark.parametrize(
    "url, words",
    [
        ("nowhere://bucket/x", "trainer.ckpt_path=nowhere://bucket/x"),
        ("s3://bucket/x", "trainer.ckpt_path=s3://bucket/x"),
    ],
)
def test_unusable_url_is_refused(settings: Any, tmp_path: Path, url: str, words: str, monkeypatch: Any):
    from skyrl_train.entrypoints.main_base import BasePPOExp

    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=words):
        BasePPOExp(settings(tmp_path, {"trainer": {"ckpt_path": url}}))


@pytest.mark.process
def test_missing_bucket_and_missing_credentials_are_refused(
    settings: Any, tmp_path: Path, s3: ObjectStore, bucket: str
):
    from s3fs import S3FileSystem

    from skyrl_train.entrypoints.main_base import BasePPOExp

    with pytest.raises(ConfigError, match=r"trainer\.export_path=s3://elsewhere/x"):
        BasePPOExp(settings(tmp_path, {"trainer": {"export_path": "s3://elsewhere/x"}}))
    missing = {"trainer": {"resume_mode": "from_path", "resume_path": f"{bucket}/global_step_3"}}
    with pytest.raises(ConfigError, match=r"trainer\.resume_path"):
        BasePPOExp(settings(tmp_path, missing))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        S3FileSystem.clear_instance_cache()
        with pytest.raises(ConfigError, match=r"trainer\.ckpt_path=s3://"):
            BasePPOExp(settings(tmp_path, {"trainer": {"ckpt_path": bucket}}))
    S3FileSystem.clear_instance_cache()


# ---- ranks and runs


cloudpickle.register_pickle_by_value(sys.modules[__name__])


class CountingWorker(PolicyWorker):
    """Worker that counts the files that this process downloads.

    Args:
        environment: of the object store; a fork has that of its server's start.
    """

    def __init__(self, environment: dict[str, str], *args: Any):
        os.environ.update(environment)
        tempfile.tempdir = environment["TMPDIR"]  # the module asks the environment once, in the fork's server
        super().__init__(*args)
        self.num_downloads = 0

    def fetch_checkpoint(self, folder: str, records: dict[str, FileRecord]) -> None:
        original = shared_download.download

        def counted(*args: Any) -> None:
            self.num_downloads += 1
            original(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_download, "download", counted)
            super().fetch_checkpoint(folder, records)

    def count(self) -> int:
        return self.num_downloads

    def checksum(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.full_state().values())


@pytest.mark.process
@pytest.mark.slow
async def test_ranks_upload_own_files_and_download_each_file_once(
    s3: ObjectStore, bucket: str, settings: Any, tmp_path: Path
):
    """Two FSDP2 ranks of one machine, whose temporary files are empty afterwards."""
    cfg = settings(tmp_path / "run", {})
    args = (s3.environment | {"TMPDIR": str(tmp_path)}, cfg, PolicyLossRegistry.get("regular"), 4)
    ranks = ForkedRanks("policy", CountingWorker, args, num_ranks=2, log_folder=tmp_path)
    group = ActorGroup("policy", ranks, device="cpu", timeout_seconds=120)
    store = CheckpointStore(bucket)
    try:
        await group.init_model()
        before = await group.call_all(CountingWorker.checksum)
        with store.writing(1) as draft:
            reports = await group.call_all(CountingWorker.save_checkpoint, str(draft.shared / "policy"))
            draft.add("policy", reports)
        names = [set(report.files) for report in reports]
        assert names[0] & names[1] == set() and all(any(n.startswith("state_") for n in own) for own in names)
        saver, completed = CheckpointSaver(store, in_background=True, timeout_seconds=120), list[str]()

        async def write_nothing(_: Path) -> None:
            pass

        await saver.save(2, [group], write_nothing, lambda: completed.append("global_step_2"))
        while not completed:  # ranks answer other calls meanwhile
            assert await group.call_all(CountingWorker.checksum) == before
        await saver.wait()
        assert {r.sha256 for r in verify(f"{bucket}/global_step_1").values()} == {
            r.sha256 for r in verify(f"{bucket}/global_step_2").values()
        }
        found = await asyncio.to_thread(store.find, latest(f"{bucket}/global_step_1"))
        assert found is not None and found.records_of("policy").keys() == names[0] | names[1]
        await load_group(group, found)
        assert await group.call_all(CountingWorker.checksum) == before
        counts = await group.call_all(CountingWorker.count)
        assert sorted(counts) == [0, len(names[0] | names[1])]
        [copies] = tmp_path.glob("skyrl-downloads-*")
        assert list(copies.iterdir()) == []

        victim = found.folder / "policy" / sorted(names[1])[-1]
        size = list_sizes(found.folder / "policy")[victim.name]
        replace_file(victim, b"x" * size)
        way_out = f"resume_path={bucket}/global_step_2"
        with pytest.raises(CheckpointError, match=f"{victim.name} is corrupted.*{way_out}"):
            await load_group(group, found)
    finally:
        group.kill()


IN_STORE = {"max_training_steps": 2, "ckpt_interval": 1, "hf_save_interval": 2, "dump_data_batch": True}


@pytest.mark.slow
@pytest.mark.process
def test_run_resumes_bitwise_from_object_store(s3: ObjectStore, bucket: str, settings: Any, run: Any, tmp_path: Path):
    places = {"ckpt_path": f"{bucket}/ckpts", "export_path": f"{bucket}/exports"}
    cfg = settings(tmp_path / "whole", {"trainer": IN_STORE | places})
    run(cfg)
    assert steps_in(places["ckpt_path"]) == ["global_step_1", "global_step_2"]
    exported = list_sizes(location(places["export_path"]))
    assert {"global_step_2/policy/config.json", "global_step_2/policy/model.safetensors"} <= exported.keys()
    assert "dumped_data/global_step_2_training_input.pkl" in exported
    resumed = settings(
        tmp_path / "resumed",
        {
            "trainer": IN_STORE
            | {"resume_mode": "from_path", "resume_path": f"{places['ckpt_path']}/global_step_1"}
            | {"ckpt_path": f"{bucket}/other"}
        },
    )
    run(resumed)
    assert steps_of(resumed) == steps_of(cfg)[1:]
    assert steps_in(f"{bucket}/other") == ["global_step_2"]
    theirs = (location(places["export_path"]) / "global_step_2" / "policy" / "model.safetensors").read_bytes()
    [ours] = tmp_path.rglob("resumed/exports/*/policy/model.safetensors")
    assert ours.read_bytes() == theirs


def start(cfg: SkyRLConfig, store: ObjectStore) -> tuple[BaseProcess, Path]:
    """Start a run in a process of its own. Returns: it, and what it prints."""
    log = Path(cfg.trainer.run_dir) / "console.log"
    log.parent.mkdir(exist_ok=True)
    as_json = json.loads(json.dumps(get_config_as_dict(cfg)))
    process = fork_server().Process(target=train, args=(as_json, str(log), store.environment))
    process.start()
    return process, log


def finish(cfg: SkyRLConfig, store: ObjectStore) -> None:
    process, log = start(cfg, store)
    process.join(120)
    assert process.exitcode == 0, log.read_text()[-4000:]


@pytest.mark.process
@pytest.mark.slow
def test_run_killed_during_upload_resumes_from_previous_checkpoint(
    s3: ObjectStore, bucket: str, settings: Any, tmp_path: Path
):
    def changes(**trainer: Any) -> dict[str, Any]:
        steps = {"max_training_steps": 3, "hf_save_interval": 3}
        return {"trainer": steps | trainer, "environment": {"env_class": "uneven"}}

    whole = settings(tmp_path / "whole", changes(ckpt_interval=-1))
    finish(whole, s3)
    cfg = settings(tmp_path / "killed", changes(ckpt_interval=1, ckpt_path=bucket))
    begun = location(bucket) / "global_step_2"
    process, log = start(cfg, s3)
    deadline = time.monotonic() + 120
    while not list_sizes(begun):
        assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-4000:]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert "manifest.json" not in list_sizes(begun), "killed too late: no proof"
    assert steps_in(bucket) == ["global_step_1"]
    finish(cfg, s3)
    assert "resumed after step 1" in log.read_text()
    assert steps_in(bucket) == ["global_step_1", "global_step_2", "global_step_3"]
    assert_equal_runs(cfg, whole)
