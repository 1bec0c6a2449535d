"""Containers: how they are made, and the scripts that run in them. Where an engine answers, all else is tested too."""

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from skyrl_agent.config.task_file import RuntimeSection
from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes import Limits, RuntimeSpec, Snapshot, make_runtime, merge_spec
from skyrl_agent.runtimes.container import KEEPER
from skyrl_agent.runtimes.leases import leases
from skyrl_agent.services import gc
from skyrl_gym.sandbox import container_owner

LIMITS = Limits(wall_seconds=30.0, cpu_seconds=30.0, memory_bytes=1 << 30, processes=7)

STAND_IN = """#!/bin/sh
"exec" "{python}" "$0" "$@"
# A `docker` that keeps what it was asked, and runs what should run inside right here, in a folder.
import json, os, sys
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
if sys.argv[1] == "inspect":
    print("true" if "{{{{.State.Running}}}}" in sys.argv else {workdir!r})
if sys.argv[1] == "ps" and any("skyrl-agent-lease=" in argument for argument in sys.argv):
    print("abc\\ndef")
if sys.argv[1] == "exec" and any("memory.max" in argument for argument in sys.argv):
    sys.exit(print({memory}))
if sys.argv[1] == "exec":
    folder = sys.argv[sys.argv.index("--workdir") + 1]
    arguments = sys.argv[sys.argv.index("--workdir") + 3:]
    if not any("kill -9 -1" in argument or argument == "/workspace" for argument in arguments):
        os.chdir(folder)
        os.execvp(arguments[0], arguments)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Commands given to a stand-in of `docker` that runs them without isolation."""
    log, workdir = tmp_path / "log", tmp_path / "testbed"
    workdir.mkdir()
    program = tmp_path / "docker"
    memory = LIMITS.memory_bytes
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log), workdir=str(workdir), memory=memory))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(container_owner, "_watched", watched := {})
    yield lambda: [asked for asked in map(json.loads, log.read_text().splitlines()) if _is_ours(asked)]
    for writing in watched.values():
        os.close(writing)


def _is_ours(asked: list[str]) -> bool:
    """Return True for a call of a runtime, False for those that look at images and at what others left."""
    return asked[0] != "image" and (asked[0] != "ps" or "skyrl-agent-lease" in asked[-1])


def runtime_of(**settings):
    return make_runtime(RuntimeSpec(**{"kind": "docker", "image": "some/image", "limits": LIMITS, **settings}))


async def test_container_uses_image_without_network(docker):
    async with runtime_of(lease_seconds=33.0) as runtime:
        (lease,) = leases()
        run = docker()[0]
        given = dict(pairwise(run))
        assert run[0] == "run" and "--rm" in run and "--privileged" not in run
        assert given["--network"] == "none"
        assert given["--cap-drop"] == "ALL" and "SYS_ADMIN" not in run and "NET_RAW" not in run
        assert given["--security-opt"] == "no-new-privileges"
        assert given["--memory"] == given["--memory-swap"] == str(1 << 30)
        assert given["--label"] == f"skyrl-agent-lease={lease.id}" == f"skyrl-agent-lease={runtime.id}"
        assert given["--mount"] == f"type=bind,source={lease.path},target=/run/skyrl-lease,readonly"
        assert run[run.index("some/image") :] == ["some/image", "-c", KEEPER, "sh", "/run/skyrl-lease", "34"]
        name = given["--name"]
    assert docker()[-1] == ["rm", "--force", "--volumes", name]


async def test_container_applies_restrictions_of_runtime_section(docker, tmp_path):
    section = RuntimeSection(kind="docker", image="some/image", user="1000", read_only=True, cpus=0.5, pull="never")
    spec = merge_spec(
        section,
        RuntimeSpec(
            limits=replace(LIMITS, memory_bytes=LIMITS.memory_bytes // 2, workspace_bytes=LIMITS.memory_bytes // 2)
        ),
    )
    async with make_runtime(replace(spec, workdir=str(tmp_path / "testbed"))):
        run = docker()[0]
    given = dict(pairwise(run))
    assert (given["--user"], given["--cpus"], given["--cap-drop"]) == ("1000", "0.5", "ALL")
    assert "--read-only" in run and "--cap-add" not in run
    assert f"{tmp_path}/testbed:rw,exec,nosuid,nodev,mode=1777,size={1 << 29}" in run
    assert given["--memory"] == str(1 << 30)  # the working directory is memory as well
    with pytest.raises(ConfigError, match=r"runtime\.user=1000"):
        merge_spec(section.model_copy(update={"kind": "local"}), RuntimeSpec())


async def test_container_settings_require_image(monkeypatch):
    monkeypatch.setenv("SKYRL_GYM_SANDBOX", "process")
    spec = merge_spec(RuntimeSection(user="1000", cpus=0.5), RuntimeSpec())
    with pytest.raises(ConfigError, match=r"runtime\.user=1000"):
        await make_runtime(spec).probe()


async def test_commands_run_in_image_working_directory(docker, tmp_path):
    async with runtime_of(files={"a/b": "text"}, env={"ONE": "its key"}) as runtime:
        assert runtime.workdir == str(tmp_path / "testbed")
        result = await runtime.exec('pwd; cat a/b; echo "$ONE"; exit 3', stdin="x")
        assert (result.stdout, result.returncode) == (f"{runtime.workdir}\ntextits key\n", 3)
        assert "its key" not in str(docker())  # every user of the machine can read command lines
        await runtime.write("a/ü c", b"\xff")
        assert await runtime.read("a/ü c") == b"\xff"
        for path, error in (("nothing", FileNotFoundError), ("a", ValueError), ("../log", ValueError)):
            with pytest.raises(error):
                await runtime.read(path)
        with pytest.raises(ValueError, match="cannot be written"):
            await runtime.write("a/b/c", "")
        with pytest.raises(ValueError, match="larger than"):
            await runtime.exec("head -c 70000000 </dev/zero >big", limits=Limits(file_bytes=1 << 30))
            await runtime.read("big")


async def test_command_limits_apply_inside_container(docker):
    async with runtime_of() as runtime:
        limits = Limits(file_bytes=4096, cpu_seconds=2.0)
        result = await runtime.exec("ulimit -t; ulimit -c; prlimit --noheadings --output HARD --fsize", limits=limits)
        assert result.stdout.split() == ["2", "0", "4096"]


async def test_leftover_processes_are_killed_before_command_returns(docker):
    async with runtime_of() as runtime:
        await runtime.exec("true")
        assert "kill -9 -1" in docker()[-1][-1]


async def test_snapshot_is_tar_or_image(docker, tmp_path):
    async with runtime_of(files={"a": "1"}) as runtime:
        snapshot = await runtime.snapshot()
        assert snapshot.kind == "tar"
        await runtime.exec("rm a")
    async with runtime_of(snapshot=snapshot) as runtime:
        assert await runtime.read("a") == b"1"
    async with runtime_of(snapshot=Snapshot("image", "another/image")):
        assert any("another/image" in asked for asked in docker())


async def test_daemon_error_is_infrastructure_failure(tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho cannot connect >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InfraError, match=r"docker (image|ps) failed: cannot connect"):
        await runtime_of().start()


async def test_leftover_containers_are_removed_by_label(docker, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SKYRL_AGENT_LEASES", str(tmp_path / "leases"))
    runtime = runtime_of(lease_seconds=1e6)
    await runtime.start()
    (lease,) = leases()
    lease.path.write_text(lease.path.read_text().replace(f'"pid": {lease.pid}', '"pid": 4194305'))
    assert gc.main(["--remove"]) == 0
    asked = docker()
    assert asked[-2][:2] == ["ps", "--all"] and asked[-2][-1] == f"label=skyrl-agent-lease={lease.id}"
    assert asked[-1] == ["rm", "--force", "--volumes", "abc", "def"]
    assert leases() == []
    await runtime.close()


def test_process_1_exits_with_lease(tmp_path):
    lease = tmp_path / "lease"
    lease.write_text("")
    keeper = subprocess.Popen(["sh", "-c", KEEPER, "sh", lease, "60"])
    try:
        time.sleep(0.3)
        keeper.terminate()  # what commands beside it may do
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(1.2)
        os.utime(lease, (time.time() - 100,) * 2)
        keeper.wait(30)
    finally:
        keeper.kill()
        keeper.wait()


def test_process_1_survives_exit_of_child_processes(tmp_path):
    """They are killed with what a command left behind: `date` and `stat` then say nothing."""
    lease = tmp_path / "lease"
    lease.write_text("")
    for name in ("date", "stat"):
        (tmp_path / name).write_text("#!/bin/sh\nkill -9 $$\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    quick = KEEPER.replace("sleep 1", "sleep 0.1")
    keeper = subprocess.Popen(["sh", "-c", quick, "sh", lease, "60"], env=env, stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(1.0)
        for name in ("date", "stat"):
            (tmp_path / name).unlink()
        os.utime(lease, (time.time() - 100,) * 2)
        keeper.wait(30)
    finally:
        keeper.kill()
        keeper.wait()
