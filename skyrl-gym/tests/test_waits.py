"""Records of waits: what another process can read of one that hangs, was killed, or goes on."""

import asyncio
import contextvars
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_gym import waits
from skyrl_gym.waits import PEERS, ProcessRecord, Wait, read_records, report_as, stop_reporting, waiting


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which this process records its waits, as `trainer`."""
    monkeypatch.setenv(waits.FOLDER, str(tmp_path))
    report_as("trainer", log="trainer.log")
    yield tmp_path
    stop_reporting()


def record_in(folder: Path) -> ProcessRecord:
    [record] = read_records(folder)
    return record


def present(folder: Path) -> list[Wait]:
    return [wait for wait in record_in(folder).waits if not wait.ended]


def test_wait_is_readable_during_and_shortly_after(folder: Path):
    before = time.time()
    with waiting("all_gather #12 of layers.3", on=PEERS, deadline=30.0):
        [wait] = present(folder)
    assert (wait.who, wait.what, wait.on, wait.deadline) == ("trainer", "all_gather #12 of layers.3", PEERS, 30.0)
    assert before <= wait.began <= time.time()
    assert wait.thread == threading.get_ident()
    assert present(folder) == []
    [ended] = record_in(folder).waits
    assert (ended.id, ended.was_given_up) == (wait.id, False)
    assert ended.ended >= wait.began


def test_header_names_process(folder: Path):
    waits.add_facts(ray="127.0.0.1:6379")
    facts = record_in(folder).facts
    assert (facts["role"], facts["pid"], facts["log"], facts["ray"]) == (
        "trainer",
        os.getpid(),
        "trainer.log",
        "127.0.0.1:6379",
    )
    assert facts["start"] == waits.start_ticks(os.getpid())


def test_wait_ended_by_exception_was_given_up(folder: Path):
    with pytest.raises(TimeoutError), waiting("the reply", on="http://judge"):
        raise TimeoutError
    [wait] = record_in(folder).waits
    assert wait.was_given_up


def test_nested_waits_name_outer_wait_and_inherit_name(folder: Path):
    with waiting("an episode", who="sample a_0"), waiting("step of environment 'sql'"):
        outer, inner = present(folder)
    assert (outer.parent, inner.parent) == (0, outer.id)
    assert inner.who == "sample a_0"
    with waiting("the next phase"):
        assert present(folder)[0].parent == 0


def test_threads_and_tasks_inherit_wait_of_context(folder: Path):
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        with waiting(name):
            seen[name] = next(wait.parent for wait in present(folder) if wait.what == name)

    async def task(name: str) -> None:
        with waiting(name):
            await asyncio.sleep(0.01)
            look(f"inside of {name}")

    async def run() -> None:
        with waiting("generate"):
            seen["generate"] = present(folder)[0].id
            await asyncio.gather(task("a"), task("b"), asyncio.to_thread(look, "thread"))
            thread = threading.Thread(target=contextvars.copy_context().run, args=(look, "copied"))
            thread.start()
            thread.join()

    asyncio.run(run())
    ids = {wait.what: wait.id for wait in record_in(folder).waits}
    assert seen["thread"] == seen["copied"] == seen["generate"]
    assert (seen["inside of a"], seen["inside of b"]) == (ids["a"], ids["b"])


def test_async_generator_closed_in_other_context_is_harmless(folder: Path):
    async def session():
        with waiting("a session"):
            yield

    async def run() -> None:
        generator = session()
        await anext(generator)
        await asyncio.create_task(generator.aclose())  # in a context of its own

    asyncio.run(run())
    assert present(folder) == []


def test_full_slots_keep_oldest_waits(folder: Path):
    several = [waiting(f"request {number}") for number in range(waits.NUM_SLOTS + 10)]
    for wait in several:
        wait.__enter__()
    names = [wait.what for wait in present(folder)]
    assert (len(names), names[0], names[-1]) == (waits.NUM_SLOTS, "request 0", f"request {waits.NUM_SLOTS - 1}")
    for wait in reversed(several):
        wait.__exit__(None, None, None)
    assert present(folder) == []
    with waiting("another"):
        assert [wait.what for wait in present(folder)] == ["another"]


def test_long_text_is_truncated(folder: Path):
    with waiting("é" * 500, on="nobody sees this"):
        [wait] = present(folder)
    assert wait.what.startswith("é" * 90)
    assert wait.on == ""


def test_nothing_is_written_without_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(waits.FOLDER, raising=False)
    report_as("trainer")
    with waiting("nothing"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(waits.FOLDER, str(tmp_path / "file" / "waits"))
    report_as("trainer")
    with waiting("nothing"):
        pass


def test_record_bytes_are_allocated_on_disk(folder: Path):
    [path] = folder.glob("*.waits")  # a hole would end the process by SIGBUS on a disk that is full later
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


def test_full_disk_is_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv(waits.FOLDER, str(tmp_path / "waits"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        report_as("trainer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with waiting("nothing"):
        pass
    assert str(tmp_path / "waits") in caplog.text and list((tmp_path / "waits").iterdir()) == []


def test_end_of_record_deletes_files(folder: Path):
    stop_reporting()
    assert list(folder.iterdir()) == []
    with waiting("nothing"):
        pass


def test_wait_outliving_record_does_not_affect_next_record(folder: Path):
    with waiting("of the first"):
        report_as("trainer")
        with waiting("of the second"):
            pass
    assert [wait.what for wait in record_in(folder).waits] == ["of the second"]
    with waiting("another"):
        assert [wait.what for wait in present(folder)] == ["another"]


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * (2048 + 1024 * 256), b"{}".ljust(2048 + 1024 * 256)])
def test_invalid_record_file_is_skipped(tmp_path: Path, content: bytes):
    (tmp_path / "x-1.waits").write_bytes(content)
    assert read_records(tmp_path) == []


HANGS = """
import os, sys, threading, time
from skyrl_gym.waits import report_as, waiting
report_as("engine 0")
def holds():
    with waiting("a reply", on="http://judge"):
        time.sleep(60)
threading.Thread(target=holds, daemon=True).start()
time.sleep(0.05)
if os.fork() == 0:
    with waiting("of the child"):
        time.sleep(0.1)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(60)
"""


def test_record_survives_crash_and_signal_dumps_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(waits.FOLDER, str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        [wait] = present(tmp_path)
        assert wait.what == "a reply", "a child that was forked has no record, and writes none into its parent's"
        stacks = record_in(tmp_path).stacks_path
        os.kill(process.pid, waits.SIGNAL)
        deadline = time.monotonic() + 10
        while "in holds" not in stacks.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert f"{wait.thread:016x}" in stacks.read_text()
        assert "in holds" in stacks.read_text()
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        assert [wait.what for wait in present(tmp_path)] == ["a reply"]
        process.kill()
    [wait] = present(tmp_path)
    assert (wait.what, wait.on, record_in(tmp_path).role) == ("a reply", "http://judge", "engine 0")
