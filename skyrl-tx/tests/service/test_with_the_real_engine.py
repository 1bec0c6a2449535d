"""The service with the engine it is made for: torch, a tiny model, killed once."""

import asyncio
import signal
from pathlib import Path

import pytest
from service_users import Client, pass_of, sample_of
from stores import service_of

from tx.tinker.base_model import read_base_model
from tx.tinker.config import EngineConfig
from tx.tinker.wire import schemas
from tx.tinker.wire.codec import decode_pass_output, decode_sample_output

pytestmark = pytest.mark.full


async def story(folder: Path, base_model: Path, *, kill: bool) -> list:
    """Three steps and a sample after each; the engine dies in the middle or not."""
    config = EngineConfig(
        base_model=str(base_model), served_model_name=["tiny"], state_dir=folder / "state",
        checkpoints_base=str(folder / "checkpoints"),
    )  # fmt: skip
    service = service_of(config, read_base_model(str(base_model)))
    await service.start()
    results = []
    try:
        alice = await Client(service).begin()
        model = await alice.model()
        for i in range(3):
            request = pass_of(model, 3 * i + 1, length=20, copies=4)
            first = await alice.submit_pass(request)
            step = await alice.step(model, 3 * i + 2, learning_rate=0.05)
            saving = await alice.save_sampler(model, 3 * i + 3, sampling_session_seq_id=i)
            if kill and i == 1:
                service.link.send_signal(signal.SIGKILL)
            results.append(decode_pass_output((await alice.stored(first, 60)).body or b"").metrics["loss:sum"])
            assert "metrics" in await alice.result(step)
            sampler = (await alice.result(saving))["sampling_session_id"]
            asked = sample_of(sampler, 0, params={"seed": 5, "max_tokens": 8})
            answer = await service.sampling.asample("alice", schemas.AsampleRequest.model_validate(asked.model_dump()))
            results.append(decode_sample_output((await alice.stored(answer, 60)).body or b"").sequences[0].tokens)
        assert service.link.deaths == int(kill)
    finally:
        await service.close()
    return results


async def test_killed_engine_changes_no_loss_and_no_sample(tmp_path: Path, tiny_model: Path):
    undisturbed = await asyncio.wait_for(story(tmp_path / "a", tiny_model, kill=False), 120)
    disturbed = await asyncio.wait_for(story(tmp_path / "b", tiny_model, kill=True), 120)
    assert disturbed == undisturbed
    assert undisturbed[4] < undisturbed[0], "it learns"
