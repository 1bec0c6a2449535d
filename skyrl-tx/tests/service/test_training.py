"""Requests of a model are executed once and in order, as an engine whose models are chains of hashes can tell."""

import asyncio
from pathlib import Path

import pytest
from scripted_engine import FAIL
from service_users import Chain, Client, pass_of, refused, restarted, wait_until

from tx.errors import Busy
from tx.tinker.service import intake
from tx.tinker.service.repetitions import compute_digest
from tx.tinker.service.results import TryAgain
from tx.tinker.service.service import TinkerService
from tx.tinker.wire import schemas
from tx.tinker.wire.codec import TrainingRequest

pytestmark = pytest.mark.process


async def test_pass_and_step_return_results(alice: Client, model: str):
    first, second = await alice.train(model, 1), await alice.step(model, 2)
    assert first == {"request_id": f"{model}:1", "model_id": model}
    assert (await alice.result(first))["state"] == Chain(model).train(1).state
    assert (await alice.result(second))["state"] == Chain(model).train(1).step(2).state


async def test_early_requests_are_done_in_order(alice: Client, model: str):
    answers = {seq: await alice.train(model, seq) for seq in (3, 2, 4, 1)}
    chain = Chain(model)
    for seq in (1, 2, 3, 4):
        assert (await alice.result(answers[seq]))["state"] == chain.train(seq).state


async def test_repeated_request_is_deduplicated(service: TinkerService, alice: Client, model: str):
    answers = await asyncio.gather(*(alice.train(model, 1) for _ in range(5)))
    await alice.result(answers[0])
    answers.append(await alice.train(model, 1))
    assert {answer["request_id"] for answer in answers} == {f"{model}:1"}
    assert (await alice.result(await alice.step(model, 2)))["state"] == Chain(model).train(1).step(2).state
    assert await alice.model() == model


async def test_reused_seq_with_other_content_is_refused(
    service: TinkerService, alice: Client, model: str, tmp_path: Path
):
    other = "was already used with different content"
    pending = await alice.train(model, 2)  # waits for its predecessor
    await refused(400, alice.train(model, 2, length=5), other)
    await refused(400, alice.step(model, 2), other)
    both = await asyncio.gather(alice.step(model, 1), alice.step(model, 1, 0.5), return_exceptions=True)
    assert sorted(type(each).__name__ for each in both) == ["RequestError", "dict"]
    assert (await alice.result(pending))["state"] == Chain(model).step(1).train(2).state
    sampler = await alice.sampler(0, base_model="tiny")
    sampled = await alice.sample(sampler, 0)
    for _ in range(2):  # under way, done
        await refused(400, alice.sample(sampler, 0, prompt=[4]), other)
        assert await alice.sample(sampler, 0) == sampled
        await alice.stored(sampled)
    saved = await alice.result(await alice.save(model, 3, "a"))
    await refused(400, alice.sampler(0, model_path=saved["path"]), "is in use by a sampler of tiny")
    together = [alice.sampler(1, base_model="tiny"), alice.sampler(1, model_path=saved["path"])]
    both = await asyncio.gather(*together, return_exceptions=True)
    assert sorted(type(each).__name__ for each in both) == ["RequestError", "str"]
    await refused(400, alice.model(rank=4), other)
    await refused(400, alice.save(model, 3, "b"), other)
    async with restarted(alice, tmp_path):
        await refused(400, alice.save(model, 3, "b"), other)
        await refused(400, alice.model(rank=4), other)
        assert await alice.save(model, 3, "a") == {"request_id": f"{model}:3", "model_id": model}


async def test_release_with_additional_field_deduplicates_requests_of_previous():
    class Later(schemas.OptimStepRequest):
        added: int | None = None

    Later.__name__ = schemas.OptimStepRequest.__name__
    same = {"model_id": "m", "seq_id": 1}
    before, now = [await compute_digest(kind.model_validate(same)) for kind in (schemas.OptimStepRequest, Later)]
    assert before == now != await compute_digest(Later(**same, added=1))


async def test_refused_request_consumes_seq_and_repeats_refusal(alice: Client, model: str, tmp_path: Path):
    bad = pass_of(model, 1)
    bad.data[0].tokens[2] = 1000
    for _ in range(2):
        why = r"data\[0\]\.model_input must be token ids from 0 to 99.*got 1000"
        await refused(400, alice.submit_pass(bad), why)
    await alice.service.intake.refuse("alice", model, 2, "body: could not be read")
    assert (await alice.result(await alice.train(model, 3)))["state"] == Chain(model).train(3).state
    await refused(400, alice.train(model, 2), "could not be read")
    nowhere = f"tinker://{model}/weights/never"
    await refused(404, alice.load(model, 4, nowhere), "no checkpoint")
    async with restarted(alice, tmp_path):
        await refused(400, alice.submit_pass(bad), why)
        await refused(404, alice.load(model, 4, nowhere), "no checkpoint")
        assert (await alice.result(await alice.step(model, 5)))["state"] == Chain(model).train(3).step(5).state


@pytest.mark.parametrize("service", [{"seq_gap_timeout_sec": 1}], indirect=True)
async def test_unfilled_gap_is_abandoned(service: TinkerService, alice: Client, model: str):
    stranded = [await alice.train(model, 2), await alice.step(model, 3)]
    for answer in stranded:
        stored = await alice.stored(answer)
        assert (stored.category, "seq_id 1 did not arrive within 1 s" in (stored.error or "")) == ("user", True)
    await refused(400, alice.train(model, 1), "seq_id 1 arrived too late")
    assert (await alice.result(await alice.train(model, 4)))["state"] == Chain(model).train(4).state


async def test_distant_seq_and_pass_without_data_are_refused(alice: Client, model: str):
    await refused(400, alice.train(model, 2_000_000), "seq_id must be 1 to 10001 at this point; got 2000000")
    empty = TrainingRequest(model, 1, [], "cross_entropy")
    await refused(400, alice.submit_pass(empty), "data must contain at least one datum")


async def test_another_tenants_things_do_not_exist(service: TinkerService, alice: Client, bob: Client, model: str):
    saved = await alice.result(await alice.save(model, 1, "mine"))
    sampler = await alice.sampler(0, model_path=saved["path"])
    for attempt in [
        bob.train(model, 2),
        bob.step(model, 2),
        bob.save(model, 2, "his"),
        bob.load(model, 2, saved["path"]),
        bob.model_from(saved["path"], 0),
        bob.sample(sampler, 0),
        bob.sampler(0, model_path=saved["path"]),
        bob.sample(None, model_path=saved["path"]),
        service.futures.retrieve("bob", f"{model}:1", 1),
        service.futures.retrieve("bob", f"{model}:7", 1),
        service.models.get_info("bob", model),
        service.models.unload("bob", model),
        service.sessions.heartbeat("bob", alice.session_id),
        service.sessions.finish("bob", alice.session_id),
        service.sessions.get("bob", alice.session_id),
        service.sampling.get_sampler("bob", sampler),
        service.checkpoints.weights_info("bob", saved["path"]),
        service.checkpoints.training_run("bob", model),
        service.checkpoints.of_run("bob", model),
        service.checkpoints.archive("bob", model, "weights", "mine"),
        service.checkpoints.delete("bob", model, "weights", "mine"),
        service.checkpoints.set_ttl("bob", model, "weights", "mine", 3600),
        service.checkpoints.publish("bob", model, "weights", "mine", True),
    ]:
        await refused(404, attempt)
    await service.intake.refuse("bob", model, 2, "nothing of mine")
    assert (await alice.result(await alice.train(model, 2)))["state"] == Chain(model).train(2).state


async def test_wrong_model_is_refused_immediately(service: TinkerService, alice: Client):
    await refused(400, alice.model(rank=1000), r"lora_config\.rank must be 1 to 64; got 1000")
    request = schemas.CreateModelRequest(session_id=alice.session_id, model_seq_id=0, base_model="gpt-9")
    names = "base_model must be 'tiny' or 'alias', which is served here; got 'gpt-9'"
    await refused(400, service.models.create("alice", request), names)
    elsewhere = request.model_copy(update={"session_id": "session_0", "base_model": "tiny"})
    await refused(404, service.models.create("alice", elsewhere), "not a live session")
    info = await service.models.get_info("alice", await alice.model(rank=16))
    assert (info["lora_rank"], info["is_lora"], info["model_name"]) == (16, True, "tiny")


@pytest.mark.parametrize("service", [{"share_expert_matrices": True}], indirect=True)
async def test_models_keep_expert_layout_when_setting_changes(service: TinkerService, alice: Client, tmp_path: Path):
    sharing = await alice.model()
    await alice.result(await alice.save(sharing, 1, "kept"))
    async with restarted(alice, tmp_path) as service:
        await alice.model(1)
        await alice.result(await alice.model_from(f"tinker://{sharing}/weights/kept", 2))
        runs = [service.state.runs[f"{alice.session_id}:train:{number}"] for number in range(3)]
        assert [run.lora.share_experts for run in runs] == [True, False, True]


async def test_failed_step_is_part_of_history(service: TinkerService, alice: Client, model: str):
    stored = await alice.stored(await alice.step(model, 1, FAIL))
    assert (stored.error, stored.category, stored.body) == ("not finite", "user", None)
    service.link.kill("the test says so")
    result = await alice.result(await alice.train(model, 2))
    assert result["state"] == Chain(model).failed(1).train(2).state


async def test_unloaded_model_first_completes_accepted_requests(
    service: TinkerService, alice: Client, model: str, tmp_path: Path
):
    accepted = [await alice.train(model, seq) for seq in (1, 2, 5)]
    gone = await service.models.unload("alice", model)
    assert await alice.result(gone) == {"model_id": model, "type": "unload_model"}
    assert (await alice.result(accepted[1]))["state"] == Chain(model).train(1).train(2).state
    assert "unloaded before its earlier requests" in ((await alice.stored(accepted[2])).error or "")
    await refused(404, alice.train(model, 3))
    assert await service.models.unload("alice", model) == gone
    await wait_until(lambda: not list((tmp_path / "state" / "snapshots").glob("*/*")), 60)


@pytest.mark.parametrize("service", [{"max_runs_gb": 1e-9}], indirect=True)
async def test_run_folders_beyond_limit_are_removed_only_for_unloaded_models(
    service: TinkerService, alice: Client, model: str, tmp_path: Path
):
    live = await alice.model(1)
    for each in (model, live):
        await alice.result(await alice.step(each, 1))
    gone, stays = (tmp_path / "state" / "runs" / each.replace(":", "_") for each in (model, live))
    await wait_until(lambda: gone.is_dir() and stays.is_dir())
    await alice.result(await service.models.unload("alice", model))
    await service._remove_old_run_folders()
    await wait_until(lambda: not gone.exists())
    assert stays.is_dir() and (tmp_path / "state" / "runs" / "server").is_dir()


@pytest.mark.parametrize("service", [{"max_pending_per_tenant": 3, "max_sample_tokens_pending": 100}], indirect=True)
async def test_overload_is_refused_without_consuming_seq(service: TinkerService, alice: Client, model: str):
    early = [await alice.train(model, seq) for seq in (2, 3, 4)]
    with pytest.raises(Busy) as busy:
        await alice.train(model, 5)
    assert busy.value.retry_after_seconds > 0
    await alice.train(model, 1)  # the one that the others wait for is always welcome
    await asyncio.gather(*(alice.result(answer) for answer in early))
    assert (await alice.result(await alice.train(model, 5)))["state"]


@pytest.mark.parametrize("service", [{"max_tokens_per_minute_per_tenant": 120}], indirect=True)
async def test_tokens_per_minute_delay_their_tenant_alone_and_in_order(
    service: TinkerService, alice: Client, bob: Client, model: str
):
    first = await alice.train(model, 1, length=60, copies=5)  # two and a half minutes', at once
    for seq in (3, 2, 4):
        with pytest.raises(Busy, match="max_tokens_per_minute_per_tenant"):
            await alice.train(model, seq)
    await alice.step(model, 5)  # has no tokens
    service.limits.quota.charge("alice", -250)  # two minutes later
    with pytest.raises(Busy):
        await alice.train(model, 3)  # not before 2
    answers = {1: first} | {seq: await alice.train(model, seq) for seq in (2, 3, 4)}
    chain = Chain(model)
    for seq, more in ((1, {"length": 60, "copies": 5}), (2, {}), (3, {}), (4, {})):
        assert (await alice.result(answers[seq]))["state"] == chain.train(seq, **more).state
    left = service.metrics()["quota_tokens_left"]["alice"]
    await refused(400, alice.train(model, 6, length=60, copies=9), "data has 540 tokens, .* 4 minutes")
    assert service.metrics()["quota_tokens_left"]["alice"] >= left, "what is refused is not charged"
    his = await bob.model()
    await bob.result(await bob.train(his, 1, length=60, copies=5))
    sampler = await bob.sampler(0, base_model="tiny")
    with pytest.raises(Busy):
        await bob.sample(sampler, 0)
    assert service.metrics()["refused_for_quota_total"] == {"alice": 4, "bob": 1}


@pytest.mark.parametrize(
    "service", [{"max_tokens_per_minute_per_tenant": 120, "seq_gap_timeout_sec": 1}], indirect=True
)
async def test_abandoned_delayed_request_stops_model_temporarily(
    service: TinkerService, alice: Client, model: str, monkeypatch: pytest.MonkeyPatch
):
    await alice.train(model, 1, length=60, copies=5)
    for seq in (2, 3):
        with pytest.raises(Busy):
            await alice.train(model, seq)
    service.limits.quota.charge("alice", -300)
    with pytest.raises(Busy):
        await alice.train(model, 3)
    monkeypatch.setattr(intake, "PATIENCE_SECONDS", 0.0)
    stored = await alice.stored(await alice.train(model, 3))
    assert "seq_id 2 did not arrive within 1 s" in (stored.error or "")
    assert (await alice.result(await alice.train(model, 4)))["state"]


async def test_poll_waits_then_returns_try_again(service: TinkerService, alice: Client, model: str):
    early = await alice.train(model, 2)
    polls = [service.futures.retrieve("alice", early["request_id"], 0.2) for _ in range(500)]
    assert set(await asyncio.gather(*polls)) == {TryAgain(f"{model}:2", "active", None)}
    waiting = [asyncio.create_task(alice.result(early)) for _ in range(500)]
    await asyncio.sleep(0.05)
    await alice.train(model, 1)
    assert len({result["state"] for result in await asyncio.gather(*waiting)}) == 1


async def test_large_payload_and_result_files_exist_only_while_needed(alice: Client, model: str, tmp_path: Path):
    chain = Chain(model)
    for seq in range(1, 7):
        chain.train(seq, length=60, copies=50)
        result = await alice.result(await alice.train(model, seq, length=60, copies=50))
        assert result["state"] == chain.state
    blobs = [path for path in (tmp_path / "state" / "blobs").glob("??/*") if len(path.name) == 32]
    assert len(blobs) <= 3, "a snapshot every 3 orders makes earlier payloads superfluous"
