"""The socket between the two processes."""

import asyncio
import stat
import threading
from pathlib import Path

from tx.tinker.commands import CreateModel, Load, Optimize, Sample, Save, Train, Unload
from tx.tinker.engine.channel import ApiChannel, EngineChannel
from tx.tinker.engine.messages import Cancel, Done, Failed, FromApi, Restore, Snapshotted
from tx.tinker.types import AdamParams, LoraSpec, SampleParams, SampleSpec

HEAD = {"request_id": "r", "tenant": "ann", "model_id": "session_1:train:0", "seq": 1}
SPEC = SampleSpec(prompt=[1, 2], params=SampleParams(seed=3, stop_strings=("\n",), stop_token_ids=(7,)))
TO_ENGINE: list[FromApi] = [
    CreateModel(**HEAD, lora=LoraSpec(rank=8, seed=5)),
    CreateModel(**HEAD, lora=LoraSpec(), folder="s3://bucket/x", optimizer=True, replay=True),
    Train(**HEAD, payload=b"small"),
    Train(**HEAD, payload=bytes(range(256)) * 4096),
    Optimize(**HEAD, adam=AdamParams(learning_rate=0.5)),
    Save(**HEAD, folder="/x", state=True),
    Load(**HEAD, folder="/x", optimizer=False),
    Unload(**HEAD),
    Sample(request_id="s", tenant="bob", spec=SPEC, adapter=None),
    Restore(model_id="m", tenant="bob", lora=LoraSpec(), snapshot=None, seq=-1),
    Cancel(request_ids=["s"]),
]


async def test_every_message_arrives_as_it_was_sent_and_in_order(tmp_path: Path):
    api = ApiChannel.bind(tmp_path / "run")
    for message in TO_ENGINE:  # before anyone listens
        await api.send(message)
    engine = EngineChannel(api.address)
    arrived = []
    async for message in engine:
        arrived.append(message)
        if isinstance(message, Cancel):
            break
    assert arrived == TO_ENGINE
    await engine.close()
    api.close()


async def test_channel_preserves_order_per_thread(tmp_path: Path):
    api = ApiChannel.bind(tmp_path)
    engine = EngineChannel(api.address)

    def answer(name: str) -> None:
        for number in range(200):
            engine.send(Done(request_id=f"{name}{number}", result=b"x" * (number * 1000)))

    threads = [threading.Thread(target=answer, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    arrived: dict[str, list[Done]] = {"a": [], "b": [], "c": []}
    async for message in api:
        assert isinstance(message, Done)
        arrived[message.request_id[0]].append(message)
        if sum(map(len, arrived.values())) == 600:
            break
    for name, results in arrived.items():
        assert [result.request_id for result in results] == [f"{name}{number}" for number in range(200)]
        assert [len(result.result) for result in results] == [number * 1000 for number in range(200)]
    await engine.close()
    api.close()


async def test_channel_delivers_messages_sent_before_engine_closed(tmp_path: Path):
    api = ApiChannel.bind(tmp_path)
    engine = EngineChannel(api.address)
    last = [Failed(request_id="r", error="no", category="user"), Snapshotted(model_id="m", seq=3, folder="/s")]
    for message in last:
        engine.send(message)
    await engine.close()
    engine.send(Done(request_id="late", result=b""))  # dropped without effect
    messages = aiter(api)
    assert [await anext(messages), await anext(messages)] == last
    api.close()


async def test_channel_close_ends_reading(tmp_path: Path):
    api = ApiChannel.bind(tmp_path)

    async def read() -> str:
        async for _ in api:
            pass
        return "ended"

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    api.close()
    assert await asyncio.wait_for(reading, 2) == "ended"


async def test_channel_read_can_be_cancelled_and_restarted(tmp_path: Path):
    api = ApiChannel.bind(tmp_path)
    reading = asyncio.create_task(anext(aiter(api)))
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert reading.cancelled()
    engine = EngineChannel(api.address)
    engine.send(Done(request_id="r", result=b"1"))
    assert await asyncio.wait_for(anext(aiter(api)), 5) == Done(request_id="r", result=b"1")
    await engine.close()
    api.close()


async def test_channel_socket_is_private_and_removed_on_close(tmp_path: Path):
    api = ApiChannel.bind(tmp_path / "run")
    path = Path(api.address.removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    api.close()
    assert not path.exists()


async def test_channel_supports_long_state_folder_path(tmp_path: Path):
    api = ApiChannel.bind(tmp_path / ("long" * 40))
    path = Path(api.address.removeprefix("ipc://"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    engine = EngineChannel(api.address)
    engine.send(Done(request_id="r", result=b""))
    assert await asyncio.wait_for(anext(aiter(api)), 5) == Done(request_id="r", result=b"")
    await engine.close()
    api.close()
    assert not path.parent.exists()
