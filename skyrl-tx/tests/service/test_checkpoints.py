"""Checkpoints: named once, found by their owner, gone when their time is over."""

import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from service_users import Chain, Client, refused, running, without_engine
from sqlalchemy import update

from tx.errors import Busy, RequestError
from tx.tinker.service.service import TinkerService
from tx.tinker.storage.db_models import CheckpointRow

pytestmark = pytest.mark.process


async def test_training_resumes_from_checkpoint(service: TinkerService, alice: Client, model: str):
    await alice.train(model, 1)
    path = (await alice.result(await alice.save(model, 2, "after-1")))["path"]
    assert path == f"tinker://{model}/weights/after-1"
    await alice.train(model, 3)
    loaded = await alice.load(model, 4, path, optimizer=True)
    assert await alice.result(loaded) == {"path": path, "model_id": model, "type": "load_weights"}
    result = await alice.result(await alice.train(model, 5))
    assert result["state"] == Chain(model).train(1).train(5).state
    info = await service.checkpoints.weights_info("alice", path)
    assert info == {
        "base_model": "tiny",
        "is_lora": True,
        "lora_rank": 8,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
    }


async def test_new_model_starts_from_checkpoint(service: TinkerService, alice: Client, model: str):
    await alice.train(model, 1)
    path = (await alice.result(await alice.save(model, 2, "x")))["path"]
    first, again = await alice.model_from(path, 1), await alice.model_from(path, 1)
    copy = f"{alice.session_id}:train:1"
    assert first == again == {"request_id": f"{copy}:0", "model_id": copy}
    assert await alice.result(first) == {"path": path, "model_id": copy, "type": "load_weights"}
    await service.checkpoints.delete("alice", model, "weights", "x")
    await service.cleanup.collect_garbage()
    service.link.kill("the test says so")  # the new model has no snapshot yet: its checkpoint's files are still needed
    state = (await alice.result(await alice.train(copy, 1, forward=True)))["state"]
    assert state == Chain(model).train(1).state


async def test_errors_name_no_server_folder(alice: Client, model: str, tmp_path: Path):
    path = (await alice.result(await alice.save(model, 1, "gone")))["path"]
    for state in tmp_path.glob("checkpoints/*/weights/gone@1/state.json"):
        state.unlink()
    stored = await alice.stored(await alice.load(model, 2, path))
    assert "FileNotFoundError" in (stored.error or "") and f"/{model}/weights/gone@1/state.json" in (stored.error or "")
    assert str(tmp_path) not in (stored.error or "")


async def test_error_words_survive_relative_server_folder_of_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    async with running(Path()) as service:  # as with --state-dir state
        alice = await Client(service).begin()
        model = await alice.model()
        path = (await alice.result(await alice.save(model, 1, "gone")))["path"]
        for state in tmp_path.glob("checkpoints/*/weights/gone@1/state.json"):
            state.unlink()
        error = (await alice.stored(await alice.load(model, 2, path))).error or ""
    assert f"/{model}/weights/gone@1/state.json" in error and str(tmp_path) not in error


async def test_save_and_load_can_be_submitted_together(alice: Client, model: str):
    await alice.save(model, 1, "start")
    await alice.train(model, 2)
    await alice.load(model, 3, f"tinker://{model}/weights/start")
    assert (await alice.result(await alice.train(model, 4)))["state"] == Chain(model).train(4).state


async def test_checkpoint_name_is_unique_unless_replaced(
    service: TinkerService, alice: Client, model: str, tmp_path: Path
):
    await alice.save(model, 1, "best")
    twin = alice.save(model, 2, "best")  # the first may still be on its way
    await refused(400, twin, "already exists; use another path, or overwrite=true")
    await alice.train(model, 3)
    await alice.result(await alice.save(model, 4, "best", overwrite=True))
    await alice.load(model, 5, f"tinker://{model}/weights/best")
    assert (await alice.result(await alice.train(model, 6)))["state"] == Chain(model).train(3).train(6).state
    assert len((await service.checkpoints.of_run("alice", model))["checkpoints"]) == 1
    await service.cleanup.collect_garbage()
    assert [p.name for p in (tmp_path / "checkpoints").glob("*/weights/*")] == ["best@4"]


@pytest.mark.parametrize(
    "service", [{"max_checkpoints_gb_per_tenant": 10e-9, "max_models_per_tenant": 2}], indirect=True
)
async def test_tenant_at_quota_is_refused_and_others_continue(
    service: TinkerService, alice: Client, bob: Client, model: str
):
    """A checkpoint has 7 bytes, and 10 are allowed."""
    await without_engine(service)
    await alice.save(model, 1, "first")
    with pytest.raises(Busy):
        await alice.save(model, 2, "second")  # how large a save is shows when the first is done
    assert service.metrics()["saves_under_way"] == {"alice": 1}
    service.link.ready = True
    service.dispatch.on_ready()
    await alice.stored(f"{model}:1")
    accepted = await alice.save(model, 2, "second")
    await refused(400, alice.save(model, 3, "third"), "take 1.4e-08 GB")  # done or under way, the second counts
    await alice.stored(accepted)
    await refused(400, alice.save(model, 4, "fourth"), r"take 1\.4e-08 GB, .* of at most 1e-08 GB .*delete some")
    await alice.result(await alice.save_sampler(model, 5, sampling_session_seq_id=0))  # without a name: it will go
    await service.cleanup.measure_disks()
    metrics = service.metrics()
    assert metrics["checkpoint_bytes"] == {"alice": 14} and metrics["saves_under_way"] == {}
    assert metrics["checkpoints_free_bytes"] == metrics["state_free_bytes"] > 0
    await service.checkpoints.delete("alice", model, "weights", "first")
    await alice.result(await alice.save(model, 6, "fourth"))

    second = await alice.model(1)
    await refused(400, alice.model(2), r"2 models of this key are live and the maximum is 2 .*unload one")
    assert await alice.model(1) == second, "a repetition is no new model"
    await bob.result(await bob.save(await bob.model(0), 1, "first"))
    await alice.result(await service.models.unload("alice", model))
    await alice.model(3)


async def test_checkpoint_name_is_not_path(alice: Client, model: str):
    for seq, name in enumerate(["../up", "a/b", ".hidden", "", "a" * 256, "-x", "a..b"], start=1):
        with pytest.raises((RequestError, ValidationError)):
            await alice.save(model, seq, name)


async def test_lists_of_runs_and_checkpoints(service: TinkerService, alice: Client, bob: Client):
    first, second = await alice.model(0), await alice.model(1)
    await alice.save(first, 1, "a" * 255, user_metadata={"why": "long"})
    await alice.save_sampler(first, 2, path="b", ttl_seconds=3600)
    await alice.result(await alice.save(first, 3, "c"))
    run = await service.checkpoints.training_run("alice", first)
    assert (run["last_checkpoint"]["checkpoint_id"], run["last_sampler_checkpoint"]["checkpoint_id"]) == (
        "weights/c",
        "sampler_weights/b",
    )
    assert (run["base_model"], run["model_owner"], run["lora_rank"], run["corrupted"]) == (
        "tiny",
        "alice",
        8,
        False,
    )
    listed = (await service.checkpoints.of_run("alice", first))["checkpoints"]
    assert [c["checkpoint_id"] for c in listed] == ["weights/c", "sampler_weights/b", "weights/" + "a" * 255]
    assert listed[0]["tinker_path"] == f"tinker://{first}/weights/c"
    assert (listed[0]["size_bytes"], listed[0]["public"], listed[0]["expires_at"]) == (7, False, None)
    assert listed[1]["checkpoint_type"] == "sampler" and listed[1]["expires_at"] > listed[1]["time"]
    assert listed[2]["user_metadata"] == {"why": "long"}
    runs = await service.checkpoints.training_runs("alice", limit=1)
    assert runs["cursor"] == {"offset": 0, "limit": 1, "total_count": 2} and len(runs["training_runs"]) == 1
    page = await service.checkpoints.of_tenant("alice", limit=2, offset=2)
    assert len(page["checkpoints"]) == 1 and page["cursor"]["total_count"] == 3
    assert (await service.checkpoints.of_tenant("bob"))["checkpoints"] == []
    assert (await service.sessions.get("alice", alice.session_id))["training_run_ids"] == [first, second]
    assert (await service.sessions.list("bob"))["sessions"] == [bob.session_id]


async def test_checkpoint_expires(service: TinkerService, alice: Client, model: str, tmp_path: Path):
    path = (await alice.result(await alice.save(model, 1, "brief", ttl_seconds=3600)))["path"]
    for ttl in (10, 3599, 20 * 365 * 86400):
        with pytest.raises(RequestError, match="ttl_seconds"):
            await service.checkpoints.set_ttl("alice", model, "weights", "brief", ttl)
    await service.checkpoints.set_ttl("alice", model, "weights", "brief", None)
    assert (await service.checkpoints.of_run("alice", model))["checkpoints"][0]["expires_at"] is None
    await service.store.write(
        lambda database: database.execute(update(CheckpointRow).values(expires_at=time.time() - 1))
    )
    await refused(404, service.checkpoints.weights_info("alice", path))
    await service.cleanup.collect_garbage()
    assert not list((tmp_path / "checkpoints").glob("*/weights/*"))
    await alice.result(await alice.save(model, 2, "brief"))


async def test_invalid_checkpoint_path_is_refused_with_field(service: TinkerService, alice: Client):
    for path in ("nonsense", "tinker://a/weights", "tinker://a/b/c", "tinker://x/weights/../../etc"):
        await refused(400, alice.model_from(path, 0), "path must be")
        await refused(400, service.checkpoints.weights_info("alice", path), "tinker_path must be")


async def test_checkpoint_of_other_rank_is_refused(alice: Client):
    small, large = await alice.model(0, rank=4), await alice.model(1, rank=16)
    path = (await alice.result(await alice.save_sampler(small, 1, path="s")))["path"]
    await refused(400, alice.load(large, 1, path), "the checkpoint's rank must be 16")
    with pytest.raises(RequestError, match="path"):
        await alice.load(small, 2, path, optimizer=True)
    assert (await alice.result(await alice.load(small, 3, path)))["path"] == path
