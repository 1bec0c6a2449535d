"""The real engine process with the tiny model: its results, and its state after a kill."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from tx.tinker.commands import CreateModel, Load, ModelCommand, Optimize, Sample, Save, Train
from tx.tinker.config import EngineConfig
from tx.tinker.engine.channel import ApiChannel
from tx.tinker.engine.messages import Cancel, Done, EngineStats, Failed, FromApi, Ready, Restore, Snapshotted
from tx.tinker.engine.process import FROM_STDIN, ORPHANED, STANDING_BY, WRONG_SETTINGS, build_engine_command
from tx.tinker.types import AdamParams, Datum, LoraSpec, SampleParams, SampleSpec
from tx.tinker.wire.codec import TrainingRequest, decode_pass_output, decode_sample_output, encode_training

pytestmark = pytest.mark.process
LORA = LoraSpec(rank=4, seed=1)


class EngineProcess:
    """An engine, and what it said so far."""

    def __init__(self, channel: ApiChannel, process: asyncio.subprocess.Process):
        self.channel, self.process = channel, process
        self.outcomes: dict[str, Done | Failed] = {}
        self.snapshots: dict[str, Snapshotted] = {}
        self.stats: EngineStats | None = None
        self.ready = asyncio.Event()
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def tell(self, *messages: FromApi) -> None:
        for message in messages:
            await self.channel.send(message)

    async def hear(self, *request_ids: str) -> list[Done | Failed]:
        """Waits for their outcomes."""
        async with asyncio.timeout(90):
            while missing := [name for name in request_ids if name not in self.outcomes]:
                assert self.process.returncode is None, f"the engine ended without {missing}"
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 1.0)
        return [self.outcomes[name] for name in request_ids]

    async def _read(self) -> None:
        async for message in self.channel:
            match message:
                case Ready():
                    self.ready.set()
                case Done() | Failed():
                    self.outcomes[message.request_id] = message
                case Snapshotted():
                    self.snapshots[message.model_id] = message
                case EngineStats():
                    self.stats = message
            self._news.set()

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send it a signal and read its remaining messages. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        status = await asyncio.wait_for(self.process.wait(), 20)
        await asyncio.sleep(0.1)
        self.channel.close()
        await self._reading
        return status


@contextlib.asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[EngineProcess]:
    channel = ApiChannel.bind(config.state_folder / "sockets")
    process = await asyncio.create_subprocess_exec(*build_engine_command(config, channel.address))
    running = EngineProcess(channel, process)
    try:
        await asyncio.wait_for(running.ready.wait(), 90)
        yield running
    finally:
        if process.returncode is None:
            await running.end()


def config_of(model: Path, folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        base_model=str(model),
        state_dir=folder / "state",
        checkpoints_base=str(folder / "checkpoints"),
        backend_config={"device": "cpu", **settings},
    )


def train(model: str, seq: int, texts: Sequence[Sequence[int]], **values: Any) -> Train:
    data = []
    for text in texts:
        tokens = np.array(text, np.int64)
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(text) - 1, np.float32)}))
    payload = encode_training(TrainingRequest(model, seq, data, "cross_entropy"))
    return Train(**head(model, seq), payload=payload, **values)


def head(model: str, seq: int) -> dict[str, Any]:
    return {"request_id": f"{model}#{seq}", "tenant": model[0], "model_id": model, "seq": seq}


def story_of(model: str, config: EngineConfig, steps: int) -> list[ModelCommand]:
    """Training with several micro-batches a request, a checkpoint on the way that is taken back, a sampler at last."""
    random = np.random.default_rng(sum(map(ord, model)))
    place = f"{config.checkpoints_base}/{model}"
    commands: list[ModelCommand] = [CreateModel(**head(model, 0), lora=LORA)]
    for step in range(steps):
        texts = [random.integers(3, 99, random.integers(5, 60)).tolist() for _ in range(12)]
        commands.append(train(model, len(commands), texts))
        commands.append(Optimize(**head(model, len(commands)), adam=AdamParams(learning_rate=0.01, weight_decay=0.1)))
        if step == 2:
            commands.append(Save(**head(model, len(commands)), folder=f"{place}/middle", state=True))
            commands.append(Load(**head(model, len(commands)), folder=f"{place}/middle", optimizer=True))
    commands.append(Save(**head(model, len(commands)), folder=f"{place}/end", state=False))
    return commands


def adapter_of(model: str, config: EngineConfig) -> bytes:
    return (Path(config.checkpoints_base) / model / "end" / "adapter_model.safetensors").read_bytes()


async def undisturbed(config: EngineConfig, stories: dict[str, list[ModelCommand]]) -> dict[str, bytes]:
    """Results of all orders by request id, and of nothing else in the engine's way."""
    async with engine(config) as running:
        for story in stories.values():  # sequentially: models share no pass
            await running.tell(*story)
            await running.hear(*(command.request_id for command in story))
        results = {name: done.result for name, done in running.outcomes.items() if isinstance(done, Done)}
        assert len(results) == sum(map(len, stories.values()))
        assert await running.end(signal.SIGTERM) == 0
    return results


def readable(result: bytes) -> Any:
    """JSON or log-probs and metrics, bit for bit; protobuf writes metrics in any order."""
    if result.startswith(b"{"):
        return result
    output = decode_pass_output(result)
    return [array.tobytes() for array in output.logprobs], output.metrics


async def after_a_crash(
    running: EngineProcess,
    stories: dict[str, list[ModelCommand]],
    recorded: dict[str, bytes],
    last: dict[str, Snapshotted],
) -> None:
    """Send a new engine what the API process sends after a crash."""
    for model, story in stories.items():
        snapshot = last.get(model)
        seq = snapshot.seq if snapshot else -1
        await running.tell(
            Restore(model_id=model, tenant=model[0], lora=LORA, snapshot=snapshot.folder if snapshot else None, seq=seq)
        )
        for command in story:
            done = command.request_id in recorded
            if command.seq > seq or not done:
                await running.tell(msgspec.structs.replace(command, replay=done))


@pytest.mark.slow
async def test_killed_engine_resumes_bit_for_bit(tiny_model: Path, tmp_path: Path):
    calm = config_of(tiny_model, tmp_path / "calm", tokens_per_micro_batch=256)
    wild = config_of(tiny_model, tmp_path / "wild", tokens_per_micro_batch=256)
    models = ("a1", "a2", "b1")
    expected = await undisturbed(calm, {model: story_of(model, calm, 6) for model in models})
    stories = {model: story_of(model, wild, 6) for model in models}
    recorded: dict[str, bytes] = {}
    last: dict[str, Snapshotted] = {}
    for kill_after in (("a1#10", "b1#2"), ()):  # a1 has a snapshot by then, b1 none
        async with engine(wild) as running:
            await after_a_crash(running, stories, recorded, last)
            names = [command.request_id for story in stories.values() for command in story]
            await running.hear(*(kill_after or [name for name in names if name not in recorded]))
            await running.end()
            twice = recorded.keys() & running.outcomes.keys()
            assert not twice, "told again what was known"
            recorded |= {name: done.result for name, done in running.outcomes.items() if isinstance(done, Done)}
            last |= running.snapshots
    assert {name: readable(result) for name, result in recorded.items()} == {
        name: readable(result) for name, result in expected.items()
    }
    for model in models:
        assert adapter_of(model, wild) == adapter_of(model, calm)
    assert last.keys() == set(models)


async def test_engine_trains_samples_fails_poisoned_request_and_stops(tiny_model: Path, tmp_path: Path):
    config = config_of(tiny_model, tmp_path)
    adapter = config.checkpoints_base + "/a1/one"
    spec = SampleSpec(
        prompt=[40, 41, 42], num_samples=2, params=SampleParams(seed=7, max_tokens=5), prompt_logprobs=True
    )
    async with engine(config) as running:
        created = CreateModel(**head("a1", 0), lora=LORA)
        long = train("a1", 1, [[5, 6, 7, 8]] * 4)
        step = Optimize(**head("a1", 2), adam=AdamParams(learning_rate=0.1))
        saved = Save(**head("a1", 3), folder=adapter, state=False)
        other = [
            CreateModel(**head("b1", 0), lora=LORA),
            train("b1", 1, [[5, 6, 4000]]),
            train("b1", 2, [[5, 6, 7, 8]] * 4),
        ]
        await running.tell(created, long, *other, step, saved)
        outcomes = await running.hear("a1#0", "a1#1", "a1#2", "a1#3", "b1#1", "b1#2")
        assert [type(outcome) for outcome in outcomes] == [Done, Done, Done, Done, Failed, Done]
        assert isinstance(outcomes[4], Failed) and outcomes[4].category == "user" and "4000" in outcomes[4].error
        losses = [decode_pass_output(running.outcomes[name].result).metrics for name in ("a1#1", "b1#2")]
        assert losses[0] == losses[1]  # of the same data under the same fresh adapter
        assert json.loads(running.outcomes["a1#2"].result)["metrics"]["grad_norm:mean"] > 0

        await running.tell(
            Sample(request_id="base", tenant="a", spec=spec, adapter=None),
            Sample(request_id="base again", tenant="b", spec=spec, adapter=None),
            Sample(request_id="adapter", tenant="a", spec=spec, adapter=adapter),
            Sample(request_id="gone", tenant="a", spec=spec, adapter=adapter + "-not"),
        )
        base, again, adapted, gone = await running.hear("base", "base again", "adapter", "gone")
        assert isinstance(base, Done) and isinstance(again, Done) and isinstance(adapted, Done)
        assert base.result == again.result != adapted.result
        assert [len(sequence.tokens) for sequence in decode_sample_output(base.result).sequences] == [5, 5]
        assert isinstance(gone, Failed) and gone.category == "user" and "no longer exist" in gone.error

        endless = SampleSpec(prompt=[40], num_samples=8, params=SampleParams(seed=1, max_tokens=500, stop_at_eos=False))
        await running.tell(Sample(request_id="endless", tenant="a", spec=endless, adapter=None))
        await running.tell(Cancel(request_ids=["endless"]), train("b1", 3, [[5, 6, 7, 8]]))
        await running.hear("b1#3")
        await asyncio.sleep(1.5)
        assert "endless" not in running.outcomes
        assert running.stats is not None and running.stats.queued_commands == 0 and running.stats.resident_models == 2
        assert running.stats.train_tokens == {"a": 12, "b": 15} and running.stats.sample_tokens["b"] == 10
        started = time.monotonic()
        assert await running.end(signal.SIGTERM) == 0
        assert time.monotonic() - started < 8
        assert running.snapshots.keys() == {"a1", "b1"}  # so that the next one has nothing to do again


@pytest.mark.full
async def test_standby_process_idles_and_becomes_engine_given_address(tiny_model: Path, tmp_path: Path):
    command = build_engine_command(config_of(tiny_model, tmp_path), FROM_STDIN)
    processes = [
        await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 90)).decode().strip() == STANDING_BY
    used, forsaken = processes
    waiting = psutil.Process(used.pid)
    assert any("libtorch" in part.path for part in waiting.memory_maps())
    before = waiting.cpu_times()
    await asyncio.sleep(1.0)
    assert waiting.cpu_times()[:2] == before[:2]

    assert forsaken.stdin is not None and used.stdin is not None
    forsaken.stdin.close()
    assert await asyncio.wait_for(forsaken.wait(), 20) == ORPHANED

    channel = ApiChannel.bind(tmp_path / "sockets")
    used.stdin.write(f"{channel.address}\n".encode())
    running = EngineProcess(channel, used)
    await asyncio.wait_for(running.ready.wait(), 60)
    assert os.getpriority(os.PRIO_PROCESS, used.pid) == os.getpriority(os.PRIO_PROCESS, 0)  # its first thread's
    assert await running.end(signal.SIGTERM) == 0


PARENT = """
import subprocess, sys, time
from tx.tinker.config import EngineConfig
from tx.tinker.engine.process import build_engine_command
child = subprocess.Popen(build_engine_command(EngineConfig.model_validate_json(sys.argv[1]), sys.argv[2]))
print(child.pid, flush=True)
time.sleep(600)
"""


async def test_engine_exits_when_parent_is_killed(tiny_model: Path, tmp_path: Path):
    config = config_of(tiny_model, tmp_path)
    channel = ApiChannel.bind(tmp_path / "sockets")
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, config.model_dump_json(), channel.address), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    engine_pid = int(await asyncio.wait_for(parent.stdout.readline(), 30))
    message = await asyncio.wait_for(anext(aiter(channel)), 90)
    assert isinstance(message, Ready)
    parent.kill()
    await parent.wait()
    deadline = time.monotonic() + 10
    while is_alive(engine_pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not is_alive(engine_pid)
    channel.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (
        status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"
    )  # orphans are not reaped here


def test_engine_exits_when_parent_is_already_dead(tiny_model: Path, tmp_path: Path):
    command = build_engine_command(config_of(tiny_model, tmp_path), f"ipc://{tmp_path}/nobody")
    command[-1] = "1000000000"  # a process that is not the one that starts it
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == ORPHANED


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"max_num_seq": 3}, "unknown setting backend_config.max_num_seq; did you mean max_num_seqs?"),
        pytest.param(
            *({"max_num_seqs": 0}, "backend_config.max_num_seqs must be a whole number above 0; got 0"),
            marks=pytest.mark.slow,
        ),
        pytest.param({"device": "abacus"}, "backend_config.device", marks=pytest.mark.slow),
    ],
)
def test_wrong_settings_exit_with_distinct_status(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any], said: str
):
    command = build_engine_command(config_of(tiny_model, tmp_path, **settings), f"ipc://{tmp_path}/nobody")
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert ended.returncode == WRONG_SETTINGS
    assert said in ended.stderr


def test_engine_command_line_shows_no_secrets(tmp_path: Path):
    config = EngineConfig(base_model="x", database_url="postgresql://me:secret@host/db", state_dir=tmp_path)
    assert "secret" not in " ".join(build_engine_command(config, "ipc:///x"))
