"""Every wait for a process has a deadline, and its error is about the process that is to blame."""

import asyncio
import atexit
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from skyrl_train.errors import ConfigError, WeightSyncError, WorkerError
from skyrl_train.orchestration.ray_launcher import WorkerProcess
from skyrl_train.utils.ray_calls import Call, gather_results, stop_actors, wait_for_all, wait_for_result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def process(start: str = "") -> Any:
    """An actor that does what it is told."""

    class Told:
        def __init__(self) -> None:
            if start:
                raise RuntimeError(start)

        def answer(self, value: Any, after: float = 0.0) -> Any:
            time.sleep(after)
            return value

        def fail(self, error: BaseException, after: float = 0.0) -> None:
            time.sleep(after)
            raise error

        def pid(self) -> int:
            return os.getpid()

    return ray.remote(Told).options(num_cpus=0).remote()


@pytest.fixture(scope="module")
def actors(ray_cpu: None) -> list[Any]:
    return [process(), process()]


def call(reference: Any, number: int = 0, log: str | Path = "nowhere.log") -> Call:
    return Call(reference, f"worker {number}", str(log))


def test_results_are_in_call_order(actors: list[Any]):
    calls = [call(actors[0].answer.remote("slow", 0.3)), call(actors[1].answer.remote("fast"), 1)]
    assert wait_for_all(calls, 30) == ["slow", "fast"]
    assert asyncio.run(gather_results([], 1)) == []


def test_timeout_names_process_and_setting(actors: list[Any], tmp_path: Path):
    (tmp_path / "worker.log").write_text("first line\nwaiting for peer\n")
    calls = [call(actors[0].answer.remote(1)), call(actors[1].answer.remote(2, 3.0), 1, tmp_path / "worker.log")]
    began = time.monotonic()
    with pytest.raises(WorkerError) as error:
        wait_for_all(calls, 1.0, "trainer.patience")
    assert time.monotonic() - began < 3
    assert str(error.value).startswith("worker 1 did not answer within 1 s (trainer.patience)")
    assert "first line\nwaiting for peer" in str(error.value)
    with pytest.raises(WorkerError, match=r"generator\.patience"):
        asyncio.run(wait_for_result(call(actors[1].answer.remote(2, 1.0), 1), 0.1, "generator.patience"))


@pytest.mark.parametrize(
    "raised, expected, words",
    [
        (RuntimeError("out of luck"), WorkerError, "worker 0 raised RuntimeError: out of luck\n--- end of nowhere.log"),
        (ConfigError("no such loss"), ConfigError, "no such loss"),
        (ValueError("shape"), ValueError, "shape"),
        (WorkerError("the thread ended"), WorkerError, "worker 0: the thread ended"),
        (WeightSyncError("other weights"), WeightSyncError, "worker 0: other weights"),
    ],
)
def test_errors_come_through_and_say_where(actors: list[Any], raised: Exception, expected: type, words: str):
    for wait in (
        lambda c: wait_for_all([c], 30),
        lambda c: asyncio.run(wait_for_result(c, 30, "x")),
    ):
        with pytest.raises(expected) as error:
            wait(call(actors[0].fail.remote(raised)))
        assert str(error.value).startswith(words)


def test_process_exception_names_line_and_log(ray_cpu: None, tmp_path: Path):
    class Buggy:
        def __init__(self, cfg: Any):
            self.cfg = cfg

        def learn(self, error: Exception) -> None:
            raise error

    worker: Any = ray.remote(WorkerProcess).options(num_cpus=0).remote(Buggy, (None,), str(tmp_path / "w.log"))

    def learn(error: Exception) -> Call:
        return call(worker.call_sequence.remote([("learn", (error,))]), log=tmp_path / "w.log")

    place = rf"{__file__}:\d+ in learn: raise error"
    with pytest.raises(WorkerError, match=rf"^worker 0 raised KeyError: 'my bug'\n{place}\nfull traceback: .*w.log$"):
        wait_for_all([learn(KeyError("my bug"))], 60)
    assert "Traceback (most recent call last)" in (tmp_path / "w.log").read_text()
    with pytest.raises(ConfigError, match=r"^no such loss\nraised in worker 0; full traceback: .*w.log$"):
        wait_for_all([learn(ConfigError("no such loss"))], 60)


def test_first_failure_does_not_wait_for_slow_calls(actors: list[Any]):
    calls = [call(actors[0].answer.remote(1, 20.0)), call(actors[1].fail.remote(RuntimeError("early")), 1)]
    began = time.monotonic()
    with pytest.raises(WorkerError, match="RuntimeError: early"):
        wait_for_all(calls, 60)
    assert time.monotonic() - began < 10


def test_crash_takes_precedence_over_peer_errors(ray_cpu: None):
    survivor, victim = process(), process()
    pid: Any = ray.get(victim.pid.remote(), timeout=60)
    calls = [call(survivor.fail.remote(RuntimeError("connection reset"))), call(victim.answer.remote(1, 30.0), 1)]
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^worker 1 died: "):
        wait_for_all(calls, 60)
    with pytest.raises(WorkerError, match=r"^worker 1 died: "):
        asyncio.run(wait_for_result(call(victim.answer.remote(1), 1), 60, "x"))


def test_failed_process_start_reports_reason(ray_cpu: None):
    with pytest.raises(WorkerError, match=r"^worker 0 .*: RuntimeError: no model at that path"):
        wait_for_all([call(process("no model at that path").pid.remote())], 60)


def test_actors_exit_in_order_and_busy_actor_is_killed(ray_cpu: None, tmp_path: Path):
    """Ray reports what is killed on the console as a crash; whoever exits in order also runs its exit handlers."""

    class Leaves:
        def write_at_exit(self, path: Path) -> int:
            atexit.register(path.touch)
            return os.getpid()

        def sleep(self) -> None:
            time.sleep(120)

    make: Any = ray.remote(Leaves).options(num_cpus=0)
    idle, busy = make.remote(), make.remote()
    pids = ray.get([actor.write_at_exit.remote(tmp_path / name) for actor, name in ((idle, "idle"), (busy, "busy"))])
    busy.sleep.remote()
    stop_actors([idle, busy], timeout_seconds=3.0)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [path.name for path in tmp_path.iterdir()] == ["idle"]
    stop_actors([idle])  # gone already


def test_cancelled_wait_leaves_no_thread(actors: list[Any]):
    """Else Ctrl-C would have to wait for the deadline of the call."""

    async def cancel_soon() -> None:
        waiting = asyncio.create_task(gather_results([call(actors[0].answer.remote(1, 15.0))], 3600))
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    began = time.monotonic()
    asyncio.run(cancel_soon())  # ends when its threads have
    assert time.monotonic() - began < 8
