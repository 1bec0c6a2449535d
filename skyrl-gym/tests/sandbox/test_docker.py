"""Creation of containers. Commands in them are tested with the other sandboxes, where a daemon answers."""

import os
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Limits, make_sandbox
from skyrl_gym.sandbox.docker import READ, WRITE, DockerSandbox

LIMITS = Limits(memory_bytes=1 << 30, workspace_bytes=1 << 20, processes=7)

STAND_IN = """#!{python}
# A `docker` that keeps what it was asked, and runs what should run inside right here.
import os, sys
with open({log!r}, "a") as log:
    print(repr(sys.argv[1:]), file=log)
if sys.argv[1] == "inspect":
    print("true")
if sys.argv[1] == "exec":
    arguments = sys.argv[sys.argv.index("/workspace") + 2:]
    if not any("kill -9 -1" in argument for argument in arguments):
        os.execvp(arguments[0], arguments)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Record the calls of a `docker` that executes them without isolation."""
    log = tmp_path / "log"
    program = tmp_path / "docker"
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return lambda: [eval(line) for line in log.read_text().splitlines()]


def options(command: list[str]) -> dict[str, str]:
    return dict(pairwise(command))


def test_a_container_has_no_network_no_rights_and_nothing_to_write_on_but_its_workspace(docker):
    with DockerSandbox(LIMITS, image="some/image"):
        run = docker()[0]
    given = options(run)
    assert run[0] == "run"
    assert given["--network"] == "none"
    assert given["--cap-drop"] == "ALL"
    assert given["--security-opt"] == "no-new-privileges"
    assert given["--ipc"] == "private"
    assert "--read-only" in run
    assert "--privileged" not in run and "--volume" not in run and "--mount" not in run
    assert given["--user"].split(":")[0] != "0"
    assert given["--memory"] == given["--memory-swap"] == str((1 << 30) + (1 << 20))
    assert int(given["--pids-limit"]) >= 7
    assert "--cpus" in run
    places = [value for option, value in pairwise(run) if option == "--tmpfs"]
    assert any(
        place.startswith("/workspace:") and f"size={1 << 20},nr_inodes=256" in place and "nosuid" in place
        for place in places
    )
    assert run.index("some/image") > run.index("--read-only")


def test_every_container_is_removed_also_one_that_nobody_closed(docker):
    with DockerSandbox(LIMITS) as sandbox:
        assert sandbox.exec(["echo", "a b", "$HOME"]).stdout == "a b $HOME\n"
        assert "kill -9 -1" in docker()[-1][-1]  # leftover processes, before the result is returned
        size = ["prlimit", "--noheadings", "--output", "HARD", "--fsize"]
        assert sandbox.exec(size, limits=Limits(file_bytes=4096)).stdout.strip() == "4096"
    asked = docker()
    name = options(asked[0])["--name"]
    assert asked[-1] == ["rm", "--force", "--volumes", name]
    sandbox = DockerSandbox(LIMITS)
    sandbox.start()
    second = options(docker()[len(asked)])["--name"]
    del sandbox
    assert docker()[-1] == ["rm", "--force", "--volumes", second] and second != name


def test_missing_daemon_is_an_error_with_dockers_words(tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho cannot connect >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InfraError, match="docker run failed: cannot connect"):
        DockerSandbox().start()


def test_a_daemon_answers():
    """No sandbox test covers containers where this fails."""
    try:
        make_sandbox("docker")
    except InfraError as error:
        pytest.skip(f"containers are not tested here: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("make, code", [("file", 0), ("folder", 5), ("link", 5), ("pipe", 5), ("nothing", 4)])
def test_the_program_that_reads_in_a_container_reads_plain_files_only(tmp_path, make, code):
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


def test_the_program_that_writes_in_a_container_replaces_links(tmp_path):
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
