"""A sampler has its weights for ever; a sample is drawn once."""

import asyncio
import threading
from pathlib import Path

import pytest
from service_users import Chain, Client, refused, restarted, without_engine

from tx.errors import Busy, RequestError
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.service import sampling
from tx.tinker.service.results import TryAgain
from tx.tinker.service.service import TinkerService
from tx.tinker.types import SampleSpec
from tx.tinker.wire.checks import check_sample

pytestmark = pytest.mark.process


async def test_sampler_keeps_weights_while_training_continues(service: TinkerService, alice: Client, model: str):
    await alice.train(model, 1)
    saved = await alice.result(await alice.save_sampler(model, 2, sampling_session_seq_id=0))
    sampler = f"{alice.session_id}:sample:0"
    assert saved == {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
    before = (await alice.result(await alice.sample(sampler, 0)))["state"]
    await alice.result(await alice.train(model, 3))
    after = (await alice.result(await alice.sample(sampler, 1)))["state"]
    assert before == after == Chain(model).train(1).state
    assert await service.sampling.get_sampler("alice", sampler) == {
        "sampler_id": sampler,
        "base_model": "tiny",
        "model_path": None,
    }


async def test_samplers_of_name_outlive_name(service: TinkerService, alice: Client, model: str, tmp_path: Path):
    path = (await alice.result(await alice.save_sampler(model, 1, path="first")))["path"]
    assert path == f"tinker://{model}/sampler_weights/first"
    sampler = await alice.sampler(3, model_path=path)
    await service.checkpoints.delete("alice", model, "sampler_weights", "first")
    await service.cleanup.collect_garbage()
    assert (await alice.result(await alice.sample(sampler, 0)))["state"] == Chain(model).state
    await refused(404, alice.sampler(4, model_path=path), "no checkpoint")
    folders = list((tmp_path / "checkpoints").glob("*/sampler_weights/*"))
    assert len(folders) == 1
    await service.sessions.finish("alice", alice.session_id)
    await service.cleanup.collect_garbage()
    assert not folders[0].exists(), "with its last user the folder goes"


async def test_prompt_targets_are_checked_off_loop_and_refused_before_storage(
    service: TinkerService, alice: Client, monkeypatch: pytest.MonkeyPatch
):
    sampler, threads = await alice.sampler(0, base_model="tiny"), []

    def check(spec: SampleSpec, facts: BaseModelFacts) -> None:
        threads.append(threading.current_thread())
        check_sample(spec, facts)

    monkeypatch.setattr(sampling, "check_sample", check)
    for seq, width in enumerate((10, 10_000)):  # of the 2 prompt tokens that something predicts
        targets = {"data": [7] * 2 * width, "shape": [2, width]}
        await alice.result(await alice.sample(sampler, seq, target_prompt_logprobs=targets))
    here = threading.main_thread()
    assert threads[0] is here and threads[1] is not here
    for seq, (data, says) in enumerate((([100] * 20_000, "ids below 100"), ([7] * 3, "shape must have")), start=2):
        wrong = {"data": data, "shape": [2, 10_000]}
        await refused(400, alice.sample(sampler, seq, target_prompt_logprobs=wrong), says)
    assert not service.state.pending
    await alice.result(await alice.sample(sampler, 2))  # its number is still free


@pytest.mark.parametrize("service", [{"backend": "skyrl_train"}], indirect=True)
async def test_prompt_targets_are_refused_before_other_backend_is_ready(service: TinkerService, alice: Client):
    targets = {"data": [7, 7], "shape": [2, 1]}
    asked = alice.sample(None, base_model="tiny", target_prompt_logprobs=targets)
    await refused(400, asked, "not computed by the backend of this server: request topk_prompt_logprobs")
    assert not service.state.pending


@pytest.mark.parametrize("service", [{"keep_samplers": 3, "sampler_idle_sec": 0}], indirect=True)
async def test_unnamed_samplers_are_replaced_by_newer_ones_of_model(
    service: TinkerService, alice: Client, model: str, tmp_path: Path
):
    """Each step of a loop of reinforcement learning saves one; another model's and a named one stay."""
    other = await alice.model(1)
    await alice.result(await alice.save_sampler(other, 1, sampling_session_seq_id=100))
    await alice.result(await alice.save_sampler(model, 1, path="named"))
    named = await alice.sampler(101, model_path=f"tinker://{model}/sampler_weights/named")
    chain, expected = Chain(model), []
    for step in range(12):
        await alice.train(model, 2 * step + 2)
        expected.append(chain.train(2 * step + 2).state)
        await alice.result(await alice.save_sampler(model, 2 * step + 3, sampling_session_seq_id=step))
        if step % 4 == 3:
            await service.cleanup.collect_garbage()
    assert len(list((tmp_path / "checkpoints").glob("*/samplers/*"))) == 3 + 1
    states = [
        (await alice.result(await alice.sample(f"{alice.session_id}:sample:{step}", 0)))["state"]
        for step in (9, 10, 11)
    ]
    assert states == expected[-3:]
    for kept in (f"{alice.session_id}:sample:100", named):
        await alice.result(await alice.sample(kept, 0))
    gone = alice.sample(f"{alice.session_id}:sample:8", 0)
    await refused(404, gone, "newer samplers of its model replaced it")


@pytest.mark.parametrize("service", [{"keep_samplers": 1, "sampler_idle_sec": 3600}], indirect=True)
async def test_sampler_in_use_is_kept_when_old(service: TinkerService, alice: Client, model: str):
    for step in range(3):
        await alice.result(await alice.save_sampler(model, step + 1, sampling_session_seq_id=step))
    await service.cleanup.collect_garbage()
    await alice.result(await alice.sample(f"{alice.session_id}:sample:0", 0))


async def test_repeated_sample_is_deduplicated(alice: Client, tmp_path: Path):
    sampler = await alice.sampler(0, base_model="alias")
    assert sampler == await alice.sampler(0, base_model="alias")
    answers = await asyncio.gather(*(alice.sample(sampler, 5, num_samples=2) for _ in range(4)))
    seed = (await alice.result(answers[0]))["seed"]
    answers.append(await alice.sample(sampler, 5, num_samples=2))
    assert {answer["request_id"] for answer in answers} == {f"{sampler}:5"}
    assert answers[0]["sample_sequence_ids"] == [f"{sampler}:5:0", f"{sampler}:5:1"]
    async with restarted(alice, tmp_path):
        again = await alice.sample(sampler, 5, num_samples=2)
        assert (await alice.result(again))["seed"] == seed, "drawn when it was first accepted, and kept"
        assert (await alice.result(await alice.sample(sampler, 3_000_000_000)))["state"] == "base"


@pytest.mark.parametrize("service", [{"stable_reinforce_as": "ppo"}, {}], indirect=True)
async def test_stability_info_is_accepted_only_with_loss_substitute(service: TinkerService, alice: Client):
    asked = alice.sample(await alice.sampler(0, base_model="tiny"), 0, record_stability_info=True)
    if service.config.stable_reinforce_as:
        assert (await alice.result(await asked))["state"] == "base"
    else:
        await refused(400, asked, "serve with --stable-reinforce-as importance_sampling")


async def test_samples_without_sampler(alice: Client, model: str):
    path = (await alice.result(await alice.save(model, 1, "one")))["path"]
    assert (await alice.result(await alice.sample(None, base_model="tiny")))["state"] == "base"
    assert (await alice.result(await alice.sample(None, model_path=path)))["state"] == Chain(model).state
    seeds = [(await alice.result(await alice.sample(None, base_model="tiny")))["seed"] for _ in range(2)]
    assert seeds[0] != seeds[1]
    for wrong in ({"base_model": "gpt-9"}, {"model_path": "tinker://a/weights/b"}, {"model_path": "../etc"}):
        with pytest.raises(RequestError):
            await alice.sample(None, **wrong)


async def test_published_checkpoints_are_usable_by_others(service: TinkerService, alice: Client, bob: Client):
    model = await alice.model(rank=4)
    path = (await alice.result(await alice.save(model, 1, "shared")))["path"]
    await service.checkpoints.publish("alice", model, "weights", "shared", True)
    assert (await service.checkpoints.weights_info("bob", path))["lora_rank"] == 4
    copy = await bob.model_from(path, 0)
    assert (await bob.result(copy))["model_id"] == copy["model_id"] == f"{bob.session_id}:train:0"
    assert (await bob.result(await bob.sample(await bob.sampler(0, model_path=path), 0)))["state"]
    await refused(404, service.checkpoints.delete("bob", model, "weights", "shared"), "no checkpoint")
    await service.checkpoints.publish("alice", model, "weights", "shared", False)
    await refused(404, service.checkpoints.weights_info("bob", path), "no checkpoint")


@pytest.mark.parametrize("service", [{"max_sample_tokens_pending": 100}], indirect=True)
async def test_long_samples_of_tenant_leave_room_for_others(service: TinkerService):
    await without_engine(service)
    alice, bob = await Client(service).begin(), await Client(service, "bob").begin()
    base, other = await alice.sampler(0, base_model="tiny"), await bob.sampler(0, base_model="tiny")
    long = {"params": {"max_tokens": 42}}  # with the prompt 45 tokens
    await alice.sample(base, 0, **long)
    await alice.sample(base, 1, **long)
    with pytest.raises(Busy, match="1 tenants is 100"):
        await alice.sample(base, 2, **long)
    await bob.sample(other, 0, **long)
    with pytest.raises(Busy, match="2 tenants is 50"):
        await bob.sample(other, 1, **long)
    assert await alice.sample(base, 1, **long), "what was accepted is accepted"


async def test_deleting_session_deletes_samplers(service: TinkerService, alice: Client, model: str, tmp_path: Path):
    await alice.result(await alice.save_sampler(model, 1, sampling_session_seq_id=0))
    sampler = f"{alice.session_id}:sample:0"
    assert (await service.sessions.get("alice", alice.session_id))["sampler_ids"] == [sampler]
    await service.sessions.finish("alice", alice.session_id)
    for attempt in (alice.sample(sampler, 1), alice.sampler(1, base_model="tiny")):
        await refused(404, attempt)
    await service.cleanup.collect_garbage()
    assert not list((tmp_path / "checkpoints").glob("*/samplers/*")), "no other user has them"
    await refused(410, service.sessions.heartbeat("alice", alice.session_id))
    await service.sessions.finish("alice", alice.session_id)


async def test_sampler_number_is_used_once(service: TinkerService, alice: Client, model: str):
    await alice.train(model, 2)  # holds back nothing, but is not done: 1 is missing
    promised = await alice.save_sampler(model, 3, sampling_session_seq_id=9)
    await refused(400, alice.save_sampler(model, 4, sampling_session_seq_id=9), "is in use")
    await refused(400, alice.sampler(9, base_model="tiny"), "is in use")
    assert isinstance(await service.futures.retrieve("alice", promised["request_id"], 0.1), TryAgain)
    await alice.train(model, 1)
    assert (await alice.result(promised))["sampling_session_id"] == f"{alice.session_id}:sample:9"
