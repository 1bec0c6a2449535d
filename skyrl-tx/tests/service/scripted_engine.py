"""The engine's side of the protocol as a process of 100 lines: an engine whose models are chains of hashes.

A model's state is the hash of all that was done to it, so a lost, doubled or swapped order shows in every later result.
It takes snapshots, replays, and dies, hangs or fails when an order says so (by its learning rate).

    python scripted_engine.py ADDRESS|- SNAPSHOTS PARENT [ORDERS_A_SNAPSHOT] [SECONDS_AN_ORDER]
"""

import asyncio
import hashlib
import json
import math
import os
import secrets
import sys
import time
from functools import partial
from pathlib import Path

from skyrl_gym.waits import report_as
from tx.tinker.backends.base import BackendInfo
from tx.tinker.commands import CreateModel, Load, ModelCommand, Optimize, Sample, Save, Train, Unload
from tx.tinker.engine.channel import EngineChannel
from tx.tinker.engine.messages import Cancel, Done, EngineStats, Failed, Ready, Restore, Snapshotted
from tx.tinker.engine.process import FROM_STDIN, STANDING_BY, call_when_parent_exits
from tx.tinker.types import ENGINE
from tx.tinker.wire.codec import TrainingRequest, decode_training

DIE, HANG, FAIL, STICK = 6.66, 7.77, 8.88, 9.99
"""Learning rates of an optimizer step that make this engine do so; for samples, temperatures. One that sticks goes on
to tell how it is."""


def chained(state: str, *what: object) -> str:
    return hashlib.sha256(repr((state, *what)).encode()).hexdigest()[:16]


def digest(request: TrainingRequest) -> str:
    """Hash the content of a request: its bytes may differ, as protobuf's maps have no order."""
    return chained("pass", *(datum.tokens.tolist() for datum in request.data))


class ScriptedEngine:
    def __init__(self, channel: EngineChannel, snapshots: Path, commands_per_snapshot: int, seconds: float):
        self.channel, self.snapshots = channel, snapshots
        self.commands_per_snapshot, self.seconds = commands_per_snapshot, seconds
        self.states: dict[str, str] = {}
        self.since: dict[str, int] = {}
        self.samples: set[str] = set()
        self.stuck = {"turn_seconds": math.inf, "step_seconds": math.inf}
        """Time since which it is stuck, by kind of work."""

    async def serve(self) -> None:
        info = BackendInfo(name="scripted", vocab_size=100, max_context=64, max_lora_rank=64)
        self.channel.send(Ready(info=info))
        stats = asyncio.create_task(self.stats())
        async for message in self.channel:
            match message:
                case Cancel():
                    self.samples -= set(message.request_ids)
                case Restore():
                    self.restore(message)
                case Sample():
                    await self.sample(message)
                case ModelCommand():
                    await self.command(message)
        stats.cancel()

    async def stats(self) -> None:
        while True:
            models, none = len(self.states), {}
            self.channel.send(
                EngineStats(
                    queued_commands=0,
                    running_samples=0,
                    resident_models=models,
                    train_tokens=none,
                    sample_tokens=none,
                    busy_seconds=0.0,
                    **{name: max(0.0, time.monotonic() - since) for name, since in self.stuck.items()},
                )
            )
            await asyncio.sleep(0.1)

    def restore(self, message: Restore) -> None:
        if message.snapshot is not None:
            saved = json.loads((Path(message.snapshot) / "state.json").read_text())
            assert saved["seq"] == message.seq, (saved, message)
            self.states[message.model_id] = saved["state"]

    async def command(self, command: ModelCommand) -> None:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if isinstance(command, Optimize) and command.adam.learning_rate in (DIE, HANG):
            misbehave(command.adam.learning_rate)
        if isinstance(command, Optimize) and command.adam.learning_rate == STICK:
            await self.stick("turn_seconds")
        if isinstance(command, Optimize) and command.adam.learning_rate == FAIL:
            self.advance(command, "failed")
            if not command.replay:
                self.channel.send(Failed(request_id=command.request_id, error="not finite", category="user"))
            return
        try:
            result, size = self.carry_out(command)
        except Exception as error:
            assert not command.replay, f"what was done before fails when it is done again: {error!r}"
            self.channel.send(
                Failed(request_id=command.request_id, error=f"{type(error).__name__}: {error}", category="user")
            )
            return
        if not command.replay:
            self.channel.send(Done(request_id=command.request_id, result=json.dumps(result).encode(), size_bytes=size))
        if not isinstance(command, Unload):
            self.snapshot_sometimes(command)

    async def stick(self, where: str) -> None:
        self.stuck[where] = time.monotonic()
        await asyncio.sleep(3600)

    def carry_out(self, command: ModelCommand) -> tuple[dict, int]:
        size = 0
        match command:
            case CreateModel():
                self.states[command.model_id] = chained("new", command.lora.rank, command.lora.seed)
                if command.folder:
                    self.states[command.model_id] = read(command.folder)
            case Train():
                request = decode_training(command.payload)
                if not request.forward_only:
                    self.advance(command, digest(request))
            case Optimize():
                self.advance(command, command.adam.learning_rate)
            case Load():
                self.states[command.model_id] = read(command.folder)
            case Save():
                Path(command.folder).mkdir(parents=True, exist_ok=True)
                (Path(command.folder) / "state.json").write_text(json.dumps({"state": self.states[command.model_id]}))
                size = 7
            case Unload():
                self.states.pop(command.model_id, None)
        return {"state": self.states.get(command.model_id), "engine": os.getpid()}, size

    def advance(self, command: ModelCommand, what: object) -> None:
        self.states[command.model_id] = chained(self.states[command.model_id], command.seq, what)

    def snapshot_sometimes(self, command: ModelCommand) -> None:
        self.since[command.model_id] = self.since.get(command.model_id, 0) + 1
        if self.since[command.model_id] < self.commands_per_snapshot:
            return
        self.since[command.model_id] = 0
        folder = self.snapshots / command.model_id / f"{command.seq}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
        state = {"state": self.states[command.model_id], "seq": command.seq}
        (folder / "state.json").write_text(json.dumps(state))
        self.channel.send(Snapshotted(model_id=command.model_id, seq=command.seq, folder=str(folder)))

    async def sample(self, command: Sample) -> None:
        if command.spec.params.temperature in (DIE, HANG):
            misbehave(command.spec.params.temperature)
        if command.spec.params.temperature == STICK:
            await self.stick("step_seconds")
        self.samples.add(command.request_id)
        await asyncio.sleep(self.seconds)
        state = "base" if command.adapter is None else read(command.adapter)
        result = {"state": state, "seed": command.spec.params.seed}
        self.channel.send(Done(request_id=command.request_id, result=json.dumps(result).encode()))


def read(folder: str) -> str:
    return json.loads((Path(folder) / "state.json").read_text())["state"]


def misbehave(how: float) -> None:
    if how == DIE:
        print("Fatal: out of luck", flush=True)
        os._exit(9)
    time.sleep(3600)


async def main(address: str, snapshots: str, parent: str, commands_per_snapshot: str = "3", seconds: str = "0") -> None:
    call_when_parent_exits(int(parent), partial(os._exit, 3))
    if address == FROM_STDIN:
        print(STANDING_BY, flush=True)
        address = sys.stdin.readline().strip()
        if not address:
            return
    report_as(ENGINE)
    channel = EngineChannel(address)
    await ScriptedEngine(channel, Path(snapshots), int(commands_per_snapshot), float(seconds)).serve()
    await channel.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
