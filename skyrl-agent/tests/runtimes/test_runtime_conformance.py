"""Behaviour of every kind of runtime."""

import asyncio
import json

import pytest

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes import Limits

from .runtime_places import LIMITS, long_sleep, processes_with, wait_until_true


async def test_runtime_start_applies_files_environment_and_setup(make):
    runtime = make(files={"a/b.txt": "text", "c.bin": b"\xff\0"}, setup=("cat a/b.txt >made",), env={"ONE": "1"})
    async with runtime:
        result = await runtime.exec('cat made; echo "$ONE $TWO"; pwd', env={"TWO": "2 3"})
        assert (result.outcome, result.returncode) == ("exited", 0)
        assert result.stdout == f"text1 2 3\n{runtime.workdir}\n"
        assert await runtime.read("c.bin") == b"\xff\0"


async def test_string_and_list_commands_return_result(make):
    async with make() as runtime:
        result = await runtime.exec([runtime.python, "-c", "print(6 * 7, input())"], stdin="ünd")
        assert result.stdout == "42 ünd\n"
        assert (await runtime.exec("[[ a == a ]] && echo $((1 + 1))")).stdout == "2\n"
        assert (await runtime.exec(["echo", "$HOME", "a  b"])).stdout == "$HOME a  b\n"
        assert (await runtime.exec("echo out; echo err >&2; exit 3")).returncode == 3
        words = ["a b", "'", '"', "\\", "$(id)", "ü\n", "-n", "*"]
        result = await runtime.exec([runtime.python, "-c", "import sys, json; print(json.dumps(sys.argv[1:]))", *words])
        assert json.loads(result.stdout) == words
        env = {f"NAME_{number}": str(number) for number in range(1000)}
        assert (await runtime.exec("echo $NAME_999", env=env)).stdout == "999\n"
        assert (await runtime.exec(["no-such-program"])).returncode != 0
        assert (await runtime.exec("echo a\0b")).returncode == 126


async def test_command_end_kills_child_processes(make):
    sleep = long_sleep()
    async with make() as runtime:
        seconds = 5.0 if runtime.spec.image else 0.5  # an engine takes a second to start a command
        result = await runtime.exec(f"echo begun; setsid {sleep} & {sleep}", timeout=seconds)
        assert (result.outcome, result.stdout) == ("wall_time", "begun\n")
        assert processes_with(sleep) == []
        env = {f"NAME_{number}": "value" * 1000 for number in range(16)}  # longer than one read of /proc/PID/environ
        for _ in range(20):  # about one process in a hundred is in the midst of an `execve`
            assert (await runtime.exec(f"setsid {sleep} >/dev/null 2>&1 & echo done", env=env)).stdout == "done\n"
            assert processes_with(sleep) == []


async def test_cancelled_command_is_killed(make):
    sleep = long_sleep()
    async with make() as runtime:
        running = asyncio.create_task(runtime.exec(f"setsid {sleep} & {sleep}"))
        while len(processes_with(sleep)) < 2:
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert processes_with(sleep) == []
        assert (await runtime.exec("echo on")).stdout == "on\n"


async def test_close_kills_detached_command(make):
    sleep = long_sleep()
    runtime = make()
    await runtime.start()
    running = asyncio.create_task(runtime.exec(sleep))
    while not processes_with(sleep):
        await asyncio.sleep(0.02)
    await runtime.close()
    assert wait_until_true(lambda: not processes_with(sleep))
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended, InfraError) or not ended.ok


async def test_large_files_and_outputs_pass_up_to_limit(make):
    data = bytes(range(256)) * 4096
    async with make() as runtime:
        result = await runtime.exec("yes", limits=Limits(output_bytes=10_000))
        assert result.outcome == "output"
        assert len(result.stdout) <= 10_000
        await runtime.write("data", data)
        assert await runtime.read("data") == data
        result = await runtime.exec("base64 -w0 data", limits=Limits(output_bytes=4 << 20))
        assert (result.outcome, len(result.stdout)) == ("exited", 4 * -(-len(data) // 3))


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\0b"])
async def test_paths_outside_workspace_are_rejected(make, path):
    async with make() as runtime:
        with pytest.raises(ValueError):
            await runtime.write(path, "x")
        with pytest.raises(ValueError):
            await runtime.read(path)


async def test_files_round_trip_and_keep_mode_on_rewrite(make):
    async with make(files={"run": "#!/bin/sh\necho one\n"}) as runtime:
        await runtime.write("a folder/ü.txt", "ä")
        assert await runtime.read("a folder/ü.txt") == "ä".encode()
        with pytest.raises(FileNotFoundError):
            await runtime.read("nothing")
        with pytest.raises(ValueError):
            await runtime.read("a folder")
        await runtime.exec("chmod 750 run")
        await runtime.write("run", "#!/bin/sh\necho two\n")
        assert (await runtime.exec("stat -c %a run; ./run")).stdout == "750\ntwo\n"


async def test_snapshot_restores_working_directory_in_new_runtime(make):
    async with make(files={"a/b": "b", "closed": "c"}) as runtime:
        await runtime.exec("chmod 755 a/b; ln -s a/b link; mkdir -p empty; chmod 0 closed; echo '-' >-name")
        snapshot = await runtime.snapshot()
    async with make(snapshot=snapshot, files={"not": "used"}) as runtime:
        result = await runtime.exec("cat link ./-name; stat -c %a a/b; ls -A")
        assert result.stdout == "b-\n755\n-name\na\nclosed\nempty\nlink\n"
    async with make() as runtime:
        snapshot = await runtime.snapshot()  # of nothing
    async with make(snapshot=snapshot) as runtime:
        assert (await runtime.exec("ls -A")).stdout == ""


async def test_full_workspace_is_command_outcome(make, request):
    if "docker" in request.node.name or "podman" in request.node.name:
        pytest.skip("files of a container are limited by its engine")
    limits = Limits(wall_seconds=30.0, workspace_bytes=1 << 20)
    async with make(limits=limits) as runtime:
        result = await runtime.exec("for i in 1 2 3 4; do yes | head -c 500000 >$i; done; sleep 20")
        assert result.outcome == "workspace"
        assert (await runtime.snapshot()).value  # what there is can still be judged
        result = await runtime.exec("sleep 0.3; yes | head -c 900000 >5; sleep 20")
        assert result.outcome == "workspace", "it may not add"
        assert (await runtime.exec("sleep 0.3; rm *; sleep 0.3")).ok, "it may make room"


async def test_failed_setup_or_invalid_file_fails_start(make):
    runtime = make(setup=("echo all is well", "echo no such thing >&2; exit 4"))
    with pytest.raises(InfraError, match=r"exit status 4\): no such thing"):
        await runtime.start()
    with pytest.raises((ValueError, InfraError), match=r"\.\./x"):
        await make(files={"../x": ""}).start()


async def test_runtime_rejects_use_before_start_and_after_close(make):
    runtime = make()
    with pytest.raises(InfraError):
        await runtime.exec("true")
    await runtime.start()
    await runtime.close()
    await runtime.close()
    for use in (runtime.exec("true"), runtime.write("a", ""), runtime.read("a"), runtime.snapshot()):
        with pytest.raises(InfraError):
            await use


async def test_cancelled_start_leaves_nothing(make):
    sleep = long_sleep()
    starting = asyncio.create_task(make(setup=(sleep,)).start())
    while not processes_with(sleep):
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert wait_until_true(lambda: not processes_with(sleep))


async def test_start_can_be_cancelled_at_any_time(make):
    for pause in (0.0, 0.001, 0.01, 0.03):
        runtime = make()
        starting = asyncio.create_task(runtime.start())
        await asyncio.sleep(pause)
        starting.cancel()
        (ended,) = await asyncio.gather(starting, return_exceptions=True)
        if ended is None:  # it was faster
            await runtime.close()


async def test_malicious_bytes_are_returned_as_text(make):
    async with make(limits=LIMITS) as runtime:
        result = await runtime.exec(r"printf 'a\377\000b'")
        assert result.stdout == "a�\0b"
