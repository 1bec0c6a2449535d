"""Ten hangs of real processes: when a deadline expires, the error names the process and the wait that are the cause."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from skyrl_gym.services import Retries, Service
from skyrl_gym.waits import FOLDER, PEERS, add_facts, end_run, read_records, waiting
from skyrl_inspect.explain.__main__ import main
from skyrl_train.distributed.process_group import find_free_port, init_process_group
from skyrl_train.errors import RolloutError, WorkerError
from skyrl_train.generators.environment import DaemonThreads, EnvironmentSession
from skyrl_train.inference_engines.remote.connection import ServerConnection
from skyrl_train.inference_engines.server_child import ServerChild
from skyrl_train.orchestration.colocation import Colocation, ColocationError
from skyrl_train.training_backends.checkpoint import write_state
from skyrl_train.utils import explanations
from skyrl_train.utils.explanations import start_recording_waits
from skyrl_train.utils.io import FileRecord
from skyrl_train.utils.shared_download import SharedDownload
from skyrl_train_testing.rank_processes import ForkedRanks
from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments

pytestmark = pytest.mark.timeout(120)

DEADLINE = 2.0
EXPLAINED_SECONDS = 30.0
"""Longest time from a deadline to its explanation."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder in which this process records its waits, as the trainer."""
    monkeypatch.setattr(explanations, "_state", explanations._State())
    start_recording_waits(tmp_path)
    yield tmp_path
    end_run()


class Rank:
    """Rank with a process group and several ways to hang."""

    def join(self, rank: int, world_size: int, port: int) -> None:
        self._rank = rank
        meeting: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "device": torch.device("cpu")}
        init_process_group(rank=rank, world_size=world_size, timeout_seconds=60, **meeting)

    def reduce(self) -> None:
        dist.all_reduce(torch.ones(2))

    def reduce_unless_rank_1(self) -> None:
        if self._rank != 1:
            dist.all_reduce(torch.ones(2))

    def names_of_collectives(self) -> list[str]:
        """Train a model of two layers for a step. Returns: the collectives of this rank, in order."""
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()
        [record] = [each for each in read_records(Path(os.environ[FOLDER])) if each.facts["pid"] == os.getpid()]
        return [wait.what for wait in record.waits if wait.on == PEERS and "#" in wait.what]

    def save(self, folder: str) -> None:
        write_state(Path(folder), [("weight", torch.ones(4))], num_steps=1, rank=0, num_ranks=1)

    def download(self, source: str) -> None:
        SharedDownload(Path(source), {"x": FileRecord(1, "0")})

    def sync(self, url: str) -> None:
        asyncio.run(ServerConnection(url, 60.0).post("/update_weights"))


@pytest.fixture
def start_ranks(run_dir: Path) -> Iterator[Callable[[int], ForkedRanks]]:
    """`start_ranks(n)`: n ranks in processes, which have met. They end with the test."""
    started: list[ForkedRanks] = []
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test

    def start(num_ranks: int) -> ForkedRanks:
        ranks = ForkedRanks("policy", Rank, num_ranks=num_ranks, log_folder=run_dir / "logs")
        started.append(ranks)
        port = find_free_port()
        joining = [[("join", (rank, num_ranks, port))] for rank in range(num_ranks)]
        asyncio.run(ranks.call(joining, 60, "start"))
        return ranks

    yield start
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    for ranks in started:
        ranks.kill()


def call(ranks: ForkedRanks, method: str, *args: object) -> None:
    calls = [[(method, args)]] * ranks.num_ranks
    asyncio.run(ranks.call(calls, DEADLINE, "trainer.worker_timeout_seconds"))


def explained(hang: Callable[[], object], run_dir: Path, error: type[Exception] = WorkerError) -> tuple[str, str]:
    """Let something hang. Returns: the first line of the error, and the text of the explanation."""
    began = time.monotonic()
    with pytest.raises(error) as raised:
        hang()
    assert time.monotonic() - began < DEADLINE + EXPLAINED_SECONDS
    [path] = (run_dir / "explanations").glob("*.txt")
    first_line = str(raised.value).splitlines()[0]
    assert f"(wait report: {path})" in first_line
    assert json.loads(path.with_suffix(".json").read_text())["cause"] in first_line
    return first_line, path.read_text()


@contextmanager
def killed_at_the_end(command: list[str]) -> Iterator[tuple["subprocess.Popen[bytes]", bytes]]:
    """Start a program with its children in a group of their own. Yields: it, and the first line that it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


# ---- ranks


@pytest.mark.slow
def test_stopped_rank(start_ranks: Callable[[int], ForkedRanks], run_dir: Path):
    ranks = start_ranks(2)
    os.kill(ranks.pids()[0], signal.SIGSTOP)
    error, text = explained(lambda: call(ranks, "reduce"), run_dir)
    assert f"policy worker 0 (pid {ranks.pids()[0]}) is stopped" in error
    assert "it blocks policy worker 1" in text or "it blocks trainer" in text
    assert "policy worker 1: all_reduce #1, waiting for its peers" in text
    assert "trainer: reduce, waiting for policy worker 0, policy worker 1" in text
    assert "in all_reduce" in text, "stacks of the rank that runs"


@pytest.mark.slow
def test_missing_collective_of_rank_is_found(start_ranks: Callable[[int], ForkedRanks], run_dir: Path):
    ranks = start_ranks(2)
    error, _ = explained(lambda: call(ranks, "reduce_unless_rank_1"), run_dir)
    assert f"policy worker 1 (pid {ranks.pids()[1]}) skipped all_reduce #1" in error


@pytest.mark.slow
def test_sharded_model_collectives_are_numbered_and_name_layer(
    start_ranks: Callable[[int], ForkedRanks],
):
    ranks = start_ranks(2)
    calls = [[("names_of_collectives", ())]] * 2
    [[first], [second]] = asyncio.run(ranks.call(calls, 60, "trainer.worker_timeout_seconds"))
    assert first == second
    assert [name.split("#")[1].split(" ")[0] for name in first] == [str(n + 1) for n in range(len(first))]
    kinds = {(name.split("_single")[0].split(" ")[0], name.rpartition(" of ")[2]) for name in first if " of " in name}
    assert kinds >= {("all_gather", "0"), ("all_gather", "1"), ("reduce_scatter", "0"), ("reduce_scatter", "1")}


@pytest.mark.slow
def test_stalled_disk(start_ranks: Callable[[int], ForkedRanks], run_dir: Path):
    """A pipe that nobody reads stands for a disk that does not answer: opening it blocks."""
    pipe = run_dir / "ckpts" / "state_0_0.safetensors"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    ranks = start_ranks(1)
    error, text = explained(lambda: call(ranks, "save", str(pipe.parent)), run_dir)
    assert f"policy worker 0 (pid {ranks.pids()[0]}) cannot finish writing {pipe}" in error
    assert "in write_durably" in text


@pytest.mark.slow
def test_lock_held_by_other_process_is_found(
    start_ranks: Callable[[int], ForkedRanks], run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    source, content = run_dir / "source", b"x"
    source.mkdir()
    (source / "x").write_bytes(content)
    ranks = start_ranks(1)
    monkeypatch.setattr("skyrl_train.utils.shared_download.download_files", lambda *args: None)
    copy = SharedDownload(source, {"x": FileRecord(1, "0")})
    copy.release()
    copy.folder.mkdir()
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True)"
    command = [sys.executable, "-c", f"{hold}; time.sleep(60)", str(copy.folder / ".lock")]
    with killed_at_the_end(command) as (holder, _):
        error, _ = explained(lambda: call(ranks, "download", str(source)), run_dir)
    assert f"pid {holder.pid} (" in error
    assert f"holds the lock {copy.folder / '.lock'}" in error


SERVER = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print(listener.getsockname()[1], flush=True)
time.sleep(30)
"""


@pytest.mark.slow
def test_sync_with_killed_engine_is_explained(start_ranks: Callable[[int], ForkedRanks], run_dir: Path):
    """A server that was killed while a child of it holds its port: connections are accepted, and nobody answers."""
    ranks = start_ranks(1)
    with killed_at_the_end([sys.executable, "-c", SERVER]) as (server, port):
        url = f"http://127.0.0.1:{int(port)}"
        server.kill()
        error, text = explained(lambda: call(ranks, "sync", url), run_dir)
    assert f"no reply from {url}" in error
    assert f"it blocks policy worker 0 (pid {ranks.pids()[0]}): the reply to POST /update_weights" in text


# ---- environments and judges


class Blocked(DifferentCharacters):
    """Environment whose step does not return before `released`."""

    released: threading.Event

    def reward(self, action: str) -> float:
        self.judge(action)
        return 0.0

    def judge(self, action: str) -> None:
        self.released.wait(60)


class AsksAJudge(Blocked):
    url: str

    def judge(self, action: str) -> None:
        Service(type(self).url, timeout=20, retries=Retries(attempts=1)).request({"answer": action})


@pytest.fixture
def environments() -> Iterator[None]:
    Blocked.released = threading.Event()
    with register_environments(blocked=Blocked, asks_a_judge=AsksAJudge):
        yield
        Blocked.released.set()


async def step(threads: DaemonThreads, environment: str, sample: str = "a_0") -> None:
    with waiting("an episode", who=f"sample {sample}"):
        session = EnvironmentSession(threads, environment, {}, {})
        await session.init([{"role": "user", "content": "?"}])
        await session.step("!")


async def in_phase(phase: str, *tasks: Awaitable[None]) -> None:
    with waiting(f"phase {phase}"):
        await asyncio.gather(*tasks)


def test_hung_environment_is_found(environments: None, run_dir: Path):
    threads = DaemonThreads(4, DEADLINE)
    error, text = explained(lambda: asyncio.run(step(threads, "blocked")), run_dir, RolloutError)
    assert "sample a_0 (pid" in error
    assert f"does not finish step of environment 'blocked', at \"{__file__}\"" in error
    assert "in judge" in error
    assert "environment.skyrl_gym.env_timeout_seconds" in text


def test_unresponsive_judge_is_found(environments: None, run_dir: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as judge:
        AsksAJudge.url = f"http://127.0.0.1:{judge.getsockname()[1]}/v1"
        threads = DaemonThreads(4, DEADLINE)
        error, text = explained(lambda: asyncio.run(step(threads, "asks_a_judge")), run_dir, RolloutError)
    assert f"no reply from {AsksAJudge.url}" in error
    assert "thus sample a_0" in text
    assert "step of environment 'asks_a_judge'" in text


def test_full_queue_is_found(environments: None, run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """The only thread is taken by a step that does not end, so another sample waits for it; asked by hand."""
    threads = DaemonThreads(1, 20.0)

    async def look() -> str:
        generating = asyncio.create_task(
            in_phase("generate", step(threads, "blocked"), step(threads, "blocked", "b_0"))
        )
        full = {("sample a_0", "step of environment 'blocked'"), ("sample b_0", "a free thread")}
        async with asyncio.timeout(20):
            while not full <= {
                (wait.who, wait.what) for wait in read_records(run_dir / "waits")[0].waits if not wait.ended
            }:
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(main, [str(run_dir)]) == 0
        Blocked.released.set()
        await generating
        return capsys.readouterr().out

    text = asyncio.run(look())
    [first] = [line for line in text.splitlines() if line.startswith("1. ")]
    assert first.startswith("1. sample a_0 (pid")
    assert "does not finish step of environment 'blocked'" in first
    queue = "the threads of environments (environment.skyrl_gym.max_env_workers)"
    assert f"sample b_0: a free thread, waiting for {queue}" in text


# ---- engines


class Movable:
    """Engines, or a group of workers, whose moves end at once."""

    name = "policy"

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    receives_all_weights = False

    async def init_model(self) -> None: ...

    async def call_all(self, method: object) -> None: ...


def test_engine_waiting_for_device_is_explained(run_dir: Path):
    async def start() -> Movable:
        return Movable()

    async def train(url: str) -> None:
        with waiting("phase policy_train"), waiting("a reply", on=url):
            await asyncio.sleep(60)

    async def restart_engine_meanwhile() -> None:
        colocation = Colocation(Movable(), engines_share_device=True, start_timeout_seconds=DEADLINE)
        await colocation.start([Movable()])  # the policy is on the device
        training = asyncio.create_task(train("http://127.0.0.1:1"))
        try:
            await colocation.start_engine(start)
        finally:
            training.cancel()

    error, text = explained(lambda: asyncio.run(restart_engine_meanwhile()), run_dir, ColocationError)
    assert "cannot start engine for 2 s" in error
    assert "no reply from http://127.0.0.1:1" in error
    assert "the start of an engine (pid" in text


@pytest.mark.slow
def test_server_without_listener_is_found(run_dir: Path):
    command = [sys.executable, "-c", "import time; time.sleep(99)"]
    server = ServerChild("the server of engine 0", command, run_dir / "log", {})
    error, text = explained(lambda: server.wait_until_ready("/", DEADLINE), run_dir)
    assert f"no reply from {server.url}" in error
    assert "the server of engine 0 to be ready" in text


# ---- Ray


@pytest.mark.slow
def test_unsatisfiable_ray_resources_are_found(ray_cpu: None, run_dir: Path):
    import ray

    from skyrl_train.orchestration.bundles import reserve_bundles

    add_facts(ray=ray.get_runtime_context().gcs_address)
    asked = int(ray.cluster_resources()["CPU"]) + 1

    def reserve() -> None:
        reserve_bundles(asked, "cpu", purpose="the ranks of policy", timeout_seconds=DEADLINE)

    error, text = explained(reserve, run_dir)
    assert f"Ray's scheduler has no resources for {asked} CPUs for the ranks of policy" in error
    assert f"of {asked} x {{'CPU': 1.0}} (PENDING)" in text
    assert "free: {'CPU': " in text


@pytest.mark.slow
async def test_stopped_engine(ray_cpu: None, chat_model: str, run_dir: Path):
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
    from skyrl_train.inference_engines.ray_wrapped_inference_engine import RayWrappedInferenceEngine, build_engine_actor

    log = str(run_dir / "logs" / "engine_0.log")
    environment = {"env_vars": {"SKYRL_WAITS": os.environ["SKYRL_WAITS"]}}
    make_actor = build_engine_actor(num_cpus=0, runtime_env=environment)
    actor = make_actor.remote(lambda: NativeInferenceEngine(chat_model), log, "engine 0")
    engine = RayWrappedInferenceEngine(actor, "engine 0", log, 60, 60, 60)
    try:
        await engine.weight_version()
        engine.control_timeout_seconds = DEADLINE
        os.kill(engine.pid(), signal.SIGSTOP)
        error, text = await asyncio.to_thread(
            explained, lambda: asyncio.run(engine.weight_version()), run_dir, WorkerError
        )
        assert f"engine 0 (pid {engine.pid()}) is stopped" in error
        assert "trainer: weight_version, waiting for engine 0" in text
    finally:
        await asyncio.to_thread(engine.kill)
