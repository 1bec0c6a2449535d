"""Runtimes on this machine: many at a time, cleanup of threads and disks, and the choice of their kind."""

import asyncio
import os
import subprocess
import tempfile
import threading
import time

import pytest

from skyrl_agent.config.task_file import RuntimeSection
from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes import HostRuntime, RuntimeSpec, make_runtime, merge_spec
from skyrl_agent.runtimes.container import LeasedContainerSandbox
from skyrl_agent.runtimes.host import make_leased_sandbox
from skyrl_agent.runtimes.local import LeasedLocalSandbox, LeasedProcessSandbox
from skyrl_agent.runtimes.remote import RemoteRuntime
from skyrl_agent.runtimes.threads import run_in_thread

from .runtime_places import LIMITS, long_sleep, processes_with


async def use(number: int) -> str:
    async with make_runtime(RuntimeSpec(files={"n": str(number)}, limits=LIMITS)) as runtime:
        await runtime.write("more", "+1")
        result = await runtime.exec("echo $(( $(cat n more) ))")
        return result.stdout


async def test_fifty_runtimes_are_isolated_and_leak_no_descriptors(needs_local):
    await use(0)
    before = len(os.listdir("/proc/self/fd"))
    answers = await asyncio.gather(*map(use, range(50)))
    assert answers == [f"{number + 1}\n" for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_queued_command_can_be_cancelled(needs_local):
    from skyrl_gym.sandbox import command as commands

    sleep = long_sleep()
    turns = [commands.background.turn() for _ in range(commands.COMMANDS_PER_PROCESSOR * (os.cpu_count() or 1))]
    async with make_runtime(RuntimeSpec(limits=LIMITS)) as runtime:
        for turn in turns:
            turn.__enter__()
        running = asyncio.create_task(runtime.exec(sleep))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for turn in turns:
            turn.__exit__(None, None, None)
        assert (await runtime.exec("echo on")).stdout == "on\n"
        assert processes_with(sleep) == []


async def test_removed_runtime_folder_is_infrastructure_failure(needs_local):
    async with make_runtime(RuntimeSpec()) as runtime:
        (name,) = os.listdir(tempfile.gettempdir())
        subprocess.run(["rm", "-rf", os.path.join(tempfile.gettempdir(), name)], check=True)
        with pytest.raises(InfraError, match="no longer exists"):
            await runtime.exec("true")


async def test_full_disk_is_reported(needs_local, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        async with make_runtime(RuntimeSpec(limits=LIMITS)) as runtime:
            with pytest.raises(InfraError, match=f"the disk of {disk}/skyrl-sandbox-.* is full"):
                await runtime.exec("yes | head -c 4000000 >big")
            with pytest.raises(InfraError, match=f"{disk}/skyrl-sandbox-.* cannot be written"):
                await runtime.write("more", "x" * 1_000_000)
            assert (await runtime.exec("rm big; echo on")).stdout == "on\n"
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


async def test_unclosed_runtime_is_removed_with_last_reference(needs_local):
    runtime = make_runtime(RuntimeSpec())
    await runtime.start()
    assert os.listdir(tempfile.gettempdir())
    del runtime  # the fixture looks for what is left


async def test_hanging_thread_call_times_out():
    hangs = threading.Event()
    started = time.monotonic()
    with pytest.raises(InfraError, match=r"0\.1 s"):
        await run_in_thread(0.1, hangs.wait)
    assert time.monotonic() - started < 30
    hangs.set()


async def test_hundreds_of_thread_calls_wait_concurrently():
    gate = threading.Barrier(300)
    await asyncio.gather(*(run_in_thread(60, gate.wait) for _ in range(300)))


async def test_thread_call_exception_is_raised():
    with pytest.raises(KeyError, match="a"):
        await run_in_thread(10, {}.__getitem__, "a")


def test_runtime_kind_is_inferred_from_spec(needs_local, monkeypatch):
    monkeypatch.delenv("SKYRL_GYM_SANDBOX", raising=False)
    assert isinstance(make_runtime(RuntimeSpec(url="http://127.0.0.1:1")), RemoteRuntime)
    assert isinstance(make_runtime(RuntimeSpec(kind="local", url="http://127.0.0.1:1")), HostRuntime)
    assert isinstance(make_leased_sandbox(RuntimeSpec(image="some/image")), LeasedContainerSandbox)
    with pytest.raises(ConfigError, match=r"runtime\.kind"):
        make_leased_sandbox(RuntimeSpec(kind="local", image="some/image"))
    assert isinstance(make_leased_sandbox(RuntimeSpec()), LeasedLocalSandbox)
    monkeypatch.setenv("SKYRL_GYM_SANDBOX", "process")
    assert isinstance(make_leased_sandbox(RuntimeSpec()), LeasedProcessSandbox)
    assert isinstance(make_leased_sandbox(RuntimeSpec(kind="local")), LeasedLocalSandbox)


@pytest.mark.parametrize(
    "section, spec, source",
    [
        (RuntimeSection(kind="local", image="a"), RuntimeSpec(), "runtime.image=a"),
        (RuntimeSection(image="a"), RuntimeSpec(kind="local"), "runtime.image=a"),
        (RuntimeSection(kind="local"), RuntimeSpec(image="a"), "the task's image=a"),
    ],
)
def test_local_runtime_rejects_image(section, spec, source):
    with pytest.raises(ConfigError) as refused:
        merge_spec(section, spec)
    assert str(refused.value).startswith(
        f"{source} has an effect only for containers; runtime.kind is local: set it to auto"
    )


def test_runtime_section_overrides_task_spec(monkeypatch):
    spec = RuntimeSpec(image="a", files={"x": "y"}, limits=LIMITS)
    assert merge_spec(RuntimeSection(), spec) == spec
    monkeypatch.setenv("A_TOKEN", "secret")
    section = RuntimeSection(
        kind="remote", url="http://b", token_env="A_TOKEN", command_timeout_seconds=300, memory_bytes=1 << 20
    )
    laid = merge_spec(section, spec)
    assert (laid.kind, laid.url, laid.token, laid.image, laid.files) == (
        "remote",
        "http://b",
        "secret",
        "a",
        {"x": "y"},
    )
    assert (laid.limits.wall_seconds, laid.limits.cpu_seconds, laid.limits.memory_bytes) == (300, 300, 1 << 20)
    monkeypatch.delenv("A_TOKEN")
    with pytest.raises(ConfigError, match=r"runtime\.token_env"):
        merge_spec(section, spec)
