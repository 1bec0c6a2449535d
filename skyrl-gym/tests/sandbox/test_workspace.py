"""The folder of a sandbox on the host: what is counted, what is deleted, and when."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import command, deletion, make_sandbox, workspace
from skyrl_gym.sandbox.workspace import ENTRY_BYTES, Workspace

FORKED = """
import os, sys
from skyrl_gym.sandbox import make_sandbox
sandbox = make_sandbox(sys.argv[1])
sandbox.start()
sandbox.exec(["true"])
if os.fork() == 0:
    with make_sandbox(sys.argv[1]) as own:
        print(own.exec(["echo", "child"]).stdout, end="", flush=True)
    sys.exit()
os.wait()
sandbox.write("x", "parent")
print(sandbox.exec(["cat", "x"]).stdout)
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    workspace._remove_stale_folders.cache_clear()
    return tmp_path


@pytest.fixture
def made(place):
    made = Workspace()
    yield made
    made.delete()
    assert list(place.iterdir()) == []


def test_usage_counts_entries_and_blocks_without_following_links(made):
    assert os.stat(made.root).st_mode & 0o077 == 0  # only its owner can look into it
    os.symlink("/", os.path.join(made.files, "link"))
    assert made.usage(1 << 30) <= 2 * ENTRY_BYTES
    made.write("a/b", b"")
    assert made.usage(1 << 30) >= 2 * ENTRY_BYTES
    before = made.usage(1 << 30)
    made.write("big", bytes(1 << 20))
    os.sync()
    assert (1 << 20) <= made.usage(1 << 30) - before <= (1 << 20) + 4 * ENTRY_BYTES


def test_usage_stops_above_limit_and_exceeds_limit_for_deep_folders(made):
    for number in range(50):
        made.write(str(number), b"")
    assert 10 * ENTRY_BYTES < made.usage(10 * ENTRY_BYTES) <= 13 * ENTRY_BYTES
    made.write("d/" * 100 + "file", b"")
    assert made.usage(1 << 30) > 1 << 30


def test_folders_of_killed_processes_are_deleted_later(place):
    left, recent = place / "skyrl-sandbox-left", place / "skyrl-sandbox-recent"
    for folder in (left, recent):
        (folder / "files").mkdir(parents=True)
    in_use = Workspace()
    an_hour_ago = time.time() - 2 * workspace.SWEEP_SECONDS
    for folder in (left, in_use.root):
        os.utime(folder, (an_hour_ago, an_hour_ago))
    workspace._remove_stale_folders.cache_clear()
    Workspace().delete()
    assert sorted(place.iterdir()) == sorted([recent, Path(in_use.root)])
    in_use.delete()


def fill(folder: str, depth: int = 200) -> None:
    """Make a chain of folders longer than a path may be, others beside it, and modes that keep everyone out."""
    chain = [os.open(folder, os.O_RDONLY)]
    for _ in range(depth):
        os.symlink("/nothing", "link", dir_fd=chain[-1])
        os.mkdir("beside", mode=0, dir_fd=chain[-1])
        os.mkdir("deeper" * 20, dir_fd=chain[-1])
        chain.append(os.open("deeper" * 20, os.O_RDONLY, dir_fd=chain[-1]))
    for descriptor in chain:
        os.fchmod(descriptor, 0)
        os.close(descriptor)


def test_deep_and_closed_folders_are_deleted(place, monkeypatch):
    monkeypatch.setattr(workspace, "CLOSE_SECONDS", 120.0)
    made = Workspace()
    fill(made.files)
    made.delete()
    assert list(place.iterdir()) == []


def test_close_does_not_wait_for_slow_deletion(place, monkeypatch):
    made = Workspace()
    fill(made.files)
    monkeypatch.setattr(workspace, "CLOSE_SECONDS", 0.0)
    made.delete()
    made.delete()
    assert list(place.iterdir()) == [Path(made.root)]  # as long as a thread deletes it
    deletion.left_folders.wait()
    assert list(place.iterdir()) == []


def test_close_fails_by_name_when_too_many_folders_wait(place, monkeypatch):
    monkeypatch.setattr(workspace, "CLOSE_SECONDS", 0.0)
    monkeypatch.setattr(deletion, "MAX_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(deletion, "left_folders", deletion.FolderDeletionQueue(max_left=1))
    first, second, third = (Workspace() for _ in range(3))
    fill(first.files)
    for number in range(3):
        os.mkdir(os.path.join(second.files, str(number)))
    first.delete()
    with pytest.raises(InfraError, match="folders of sandboxes"):
        for left in (second, third):
            left.delete()
    deletion.left_folders.wait()


@pytest.mark.parametrize("kind", ["local", "process"])
def test_forked_process_keeps_parent_sandbox_and_can_create_another(kind, request):
    if kind == "local":
        request.getfixturevalue("needs_local")
    ended = subprocess.run([sys.executable, "-c", FORKED, kind], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "child\nparent\n", ended.stderr


def test_command_is_killed_when_monitor_fails(needs_local, monkeypatch):
    def broken(*_):
        raise RuntimeError("no /proc")

    with make_sandbox("local") as sandbox:
        monkeypatch.setattr(command.Command, "_limit_passed", broken)
        started = time.monotonic()
        with pytest.raises(InfraError, match="/proc"):
            sandbox.exec(["sleep", "60"])
        assert time.monotonic() - started < 10
