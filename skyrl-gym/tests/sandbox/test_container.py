"""Creation and removal of containers. Commands in them are tested with the other sandboxes, where an engine answers."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Limits, backends, container_engine, container_owner, machine_image, make_sandbox
from skyrl_gym.sandbox.container import END, FULL, READ, WRITE, ContainerSandbox

LIMITS = Limits(memory_bytes=1 << 30, workspace_bytes=1 << 20, processes=7)

STAND_IN = """#!/bin/sh
"exec" "{python}" "$0" "$@"
# A container engine that keeps what it was asked, and runs what should run inside right here.
import json, os, sys, time
asked = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps(asked), file=log)
if asked[0] == "inspect":
    print("true")
if asked[0] == "ps" and "--format" in asked:
    print(os.environ.get("LISTED", ""))
if asked[0] == "ps" and "--quiet" in asked:
    print("abc")
if asked[:2] == ["image", "inspect"] and "absent" in asked[-1]:
    sys.exit("Error: no such image " + asked[-1])
while asked[0] == "pull" and "slow" in asked[-1] and not os.path.exists({log!r} + ".go"):
    time.sleep(0.02)
if asked[0] == "exec" and any("memory.max" in argument for argument in asked):
    print((1 << 30) + (1 << 20), (1 << 30) + (256 << 20))
elif asked[0] == "exec":
    arguments = asked[asked.index("/workspace") + 2:]
    if not any("kill -9 -1" in argument for argument in arguments):
        os.execvp(arguments[0], arguments)
"""


@pytest.fixture(params=["docker", "podman"])
def engine(request, tmp_path, monkeypatch):
    """The name of an engine whose command is a stand-in."""
    program = tmp_path / request.param
    program.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(container_engine, "_present", {})
    monkeypatch.setattr(backends, "_found", {})
    monkeypatch.setattr(container_owner, "_watched", watched := {})
    yield request.param
    for writing in watched.values():
        os.close(writing)


@pytest.fixture
def calls(engine, tmp_path):
    """Calls of the engine so far, but for those that look at images and leftovers."""

    def read() -> list[list[str]]:
        asked = map(json.loads, (tmp_path / "log").read_text().splitlines())
        return [call for call in asked if call[0] not in ("ps", "image")]

    return read


def options(command: list[str]) -> dict[str, str]:
    return dict(pairwise(command))


def test_container_has_no_network_no_privileges_and_read_only_root(engine, calls, tmp_path):
    with ContainerSandbox(LIMITS, {"/seen": str(tmp_path)}, engine=engine, image="some/image"):
        run = calls()[0]
    given = options(run)
    assert run[0] == "run"
    assert given["--network"] == "none"
    assert given["--cap-drop"] == "ALL"
    assert given["--security-opt"] == "no-new-privileges"
    assert given["--ipc"] == "private"
    assert "--read-only" in run
    assert "--privileged" not in run and "--volume" not in run
    assert given["--mount"] == f"type=bind,source={tmp_path},target=/seen,readonly" and run.count("--mount") == 1
    assert given["--user"].split(":")[0] != "0"
    assert given["--memory"] == given["--memory-swap"] == str((1 << 30) + (1 << 20))
    assert int(given["--pids-limit"]) >= 7
    assert "--cpus" in run
    places = [value for option, value in pairwise(run) if option == "--tmpfs"]
    (workspace,) = [place for place in places if place.startswith("/workspace:")]
    assert f"size={1 << 20}" in workspace and "nosuid" in workspace
    assert ("nr_inodes=256" in workspace) == (engine == "docker")
    assert ("--read-only-tmpfs=false" in run) == (engine == "podman")
    assert run.index("some/image") > run.index("--read-only")


def test_containers_are_removed_even_when_not_closed(engine, calls):
    with ContainerSandbox(LIMITS, engine=engine) as sandbox:
        assert sandbox.exec(["echo", "a b", "$HOME"]).stdout == "a b $HOME\n"
        assert "kill -9 -1" in calls()[-1][-1]  # leftover processes, before the result is returned
        size = ["prlimit", "--noheadings", "--output", "HARD", "--fsize"]
        assert sandbox.exec(size, limits=Limits(file_bytes=4096)).stdout.strip() == "4096"
    asked = calls()
    name = options(asked[0])["--name"]
    assert asked[-1] == ["rm", "--force", "--volumes", name]
    sandbox = ContainerSandbox(LIMITS, engine=engine)
    sandbox.start()
    second = options(calls()[len(asked)])["--name"]
    del sandbox
    assert calls()[-1] == ["rm", "--force", "--volumes", second] and second != name


KILLED = """
import os, signal, sys
from skyrl_gym.sandbox import Limits
from skyrl_gym.sandbox.container import ContainerSandbox
sandbox = ContainerSandbox(Limits(memory_bytes=1 << 30, workspace_bytes=1 << 20), engine=sys.argv[1])
sandbox.start()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_containers_of_killed_process_are_removed(engine, tmp_path, monkeypatch):
    owner = container_owner.get_container_owner(engine)
    boot, pid, start = owner.rsplit("-", 2)
    listed = [f"skyrl-gym-{owner}-a", f"skyrl-gym-{boot}-{pid}-{int(start) - 1}-b", f"skyrl-gym-other.1-{pid}-1-c"]
    listed.append("skyrl-gym-0123456789abcdef")  # of a release without owners
    monkeypatch.setenv("LISTED", "\n".join(listed))
    ended = subprocess.run([sys.executable, "-c", KILLED, engine], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    asked = []
    deadline = time.monotonic() + 60
    while ["rm", "--force", "--volumes", "abc"] not in asked and time.monotonic() < deadline:
        time.sleep(0.02)
        asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    run = next(call for call in asked if call[0] == "run")
    assert asked[-2] == ["ps", "--all", "--quiet", "--filter", f"label={options(run)['--label']}"]
    assert [call[3:] for call in asked if call[0] == "rm"] == [[listed[1]], ["abc"]]


@pytest.mark.parametrize(
    "pull, image, expected",
    [
        ("missing", "here", 0),
        ("missing", "absent", 1),
        ("always", "here", 1),
        ("never", "here", 0),
        ("never", "absent", None),
    ],
)
def test_image_is_pulled_by_policy_once_per_process(engine, calls, pull, image, expected):
    if expected is None:
        with pytest.raises(InfraError, match=f"{engine}.*'absent'"):
            container_engine.ensure_image(engine, image, pull)
        return
    for _ in range(2):
        container_engine.ensure_image(engine, image, pull)
    assert calls() == [["pull", "--quiet", image]] * expected


def test_policy_always_pulls_local_image(engine, calls):
    for pull in ("missing", "always", "missing", "always"):
        container_engine.ensure_image(engine, "here", pull)
    assert calls() == [["pull", "--quiet", "here"]]


def test_slow_pull_does_not_block_other_images(engine, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(make_sandbox, engine, image="slow/absent")
        try:
            while "slow/absent" not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
                time.sleep(0.02)
            threads.submit(make_sandbox, engine, image="here").result(timeout=30)
            assert not slow.done()
        finally:
            (tmp_path / "log.go").touch()
        assert isinstance(slow.result(timeout=30), ContainerSandbox)


FORK_UNDER_LOCK = """
import os
from skyrl_gym.sandbox import backends, container_engine, container_owner

for locks in (container_engine._locks, container_owner._locks, backends._finding):
    with locks["held"]:
        child = os.fork()
        if child == 0:
            os._exit(0 if locks["held"].acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert locks["held"].locked() and not locks["another"].locked()
"""


def test_locks_are_free_after_fork():
    """In a process without other threads: a fork beside them may never come back."""
    subprocess.run([sys.executable, "-c", FORK_UNDER_LOCK], check=True, timeout=60)


@pytest.mark.parametrize(
    "said, remedy",
    [
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            "start it",
        ),
        (
            "permission denied while trying to connect to the Docker daemon socket at unix:///x.sock",
            "to the group docker",
        ),
        ("Error response from daemon: pull access denied for a/b, repository does not exist", "check the name, tag"),
        ("Error: a/b: image not known", "check the name, tag"),
        ('Error: short-name "a" did not resolve to an alias', "check the name, tag"),
        ("Error: writing blob: storing blob: write /var/tmp/x: no space left on device", "system prune` makes some"),
        ('Error: cannot find UID/GID for user x: no subuid ranges found for user "x" in /etc/subuid', "package uidmap"),
        ("Error: OCI runtime error: crun: cgroups in hybrid mode not supported", "apt-get install runc"),
    ],
)
def test_engine_error_includes_remedy(tmp_path, monkeypatch, said, remedy):
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2; exit 125\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InfraError, match="docker ps failed: ") as caught:
        container_engine.check_engine("docker")
    assert said in str(caught.value) and remedy in str(caught.value).removeprefix(said)


def test_missing_engine_error_names_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfraError, match=r"docker .*podman"):
        container_engine.find_engine()


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_container_engine_is_available(kind):
    """No sandbox test covers containers where this fails."""
    try:
        container_engine.check_engine(kind)
    except InfraError as error:
        pytest.skip(f"containers of {kind} are not tested here: {str(error).splitlines()[0]}")


def test_image_requires_container_backend():
    with pytest.raises(ValueError, match="image='a'"):
        make_sandbox("local", image="a")


def test_file_system_is_full_without_free_blocks_or_inodes(tmp_path):
    measure = END.split("\n")[-2].replace("/workspace", str(tmp_path))
    said = subprocess.run(["sh", "-c", measure], capture_output=True, text=True).stdout
    assert len(re.findall(r"^free \d+ \d+ of \d+$", said, re.MULTILINE)) == 3
    assert FULL.search("free 5 5 of 9\nfree 0 5 of 9\n") and FULL.search("free 5 0 of 9\n")
    assert not FULL.search("free 5 0 of 0\nfree 10 5 of 9\n")  # btrfs counts none


def test_machine_image_includes_glibc_thread_exit_library():
    assert any(path.endswith("/libgcc_s.so.1") for path in machine_image.libraries([Path(sys.executable)]))


@pytest.mark.parametrize("make, code", [("file", 0), ("folder", 5), ("link", 5), ("pipe", 5), ("nothing", 4)])
def test_container_read_program_reads_only_plain_files(tmp_path, make, code):
    place = tmp_path / "a"
    place.mkdir()
    {
        "file": lambda path: path.write_bytes(b"x\xff"),
        "folder": Path.mkdir,
        "link": lambda path: path.symlink_to("/etc/passwd"),
        "pipe": os.mkfifo,
        "nothing": lambda path: None,
    }[make](place / "it")
    program = READ.replace("/workspace", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program, "100", "a", "it"], capture_output=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (code, b"x\xff" if code == 0 else b"")


def test_container_write_program_replaces_links(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "w" / "a").mkdir(parents=True)
    (tmp_path / "w" / "a" / "it").symlink_to(tmp_path / "secret")
    (tmp_path / "w" / "out").symlink_to(tmp_path)
    program = WRITE.replace("/workspace", str(tmp_path / "w"))
    for folders, code in ((["a", "it"], 0), (["new", "b", "it"], 0), (["out", "it"], 5)):
        ended = subprocess.run(
            [sys.executable, "-c", program, *folders], input=b"mine", capture_output=True, timeout=30
        )
        assert ended.returncode == code, ended.stderr
    assert (tmp_path / "w" / "a" / "it").read_bytes() == (tmp_path / "w" / "new" / "b" / "it").read_bytes() == b"mine"
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (tmp_path / "it").exists()
