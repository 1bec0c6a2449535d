"""Leases of runtimes: owners, renewal, and runtimes left behind."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import pytest

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes import RuntimeSpec, make_runtime
from skyrl_agent.runtimes.heartbeat import LeaseRenewal
from skyrl_agent.runtimes.leases import FOLDER_VARIABLE, Lease, leases, process_start
from skyrl_agent.runtimes.leftovers import remove, remove_leftovers
from skyrl_agent.services import gc


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Leases of one test, which nobody else sweeps."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "leases"))
    return tmp_path / "leases"


def lease_of(owner=None, age=0.0, **changes):
    """A lease that says what `changes` say, `age` seconds after its last heartbeat."""
    lease = Lease.take(changes.pop("id", "lease-1"), "local", changes.pop("seconds", 60.0))
    if owner is not None:
        changes |= {"pid": owner, "process_start": process_start(owner)}
    lease = replace(lease, **changes)
    record = {name: getattr(lease, name) for name in Lease.__dataclass_fields__ if name != "path"}
    lease.path.write_text(json.dumps(record) + "\n")
    os.utime(lease.path, (time.time() - age,) * 2)
    return lease


def workspace() -> str:
    return tempfile.mkdtemp(prefix="skyrl-sandbox-")


def test_lease_records_owner_and_resource():
    lease = Lease.take("one", "local", 5.0, "/a/folder")
    (found,) = leases()
    said = found.id, found.kind, found.seconds, found.pid, found.folder
    assert said == ("one", "local", 5.0, os.getpid(), "/a/folder")
    assert found.describe_abandonment() is None
    lease.release()
    lease.release()
    assert leases() == []


def test_reused_pid_and_zombie_count_as_ended_owner():
    assert not lease_of(owner=os.getpid()).owner_ended
    assert lease_of(id="lease-2", process_start=process_start(os.getpid()) - 1).owner_ended
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but still in the list of processes
    assert process_start(child.pid) is None
    child.wait()


@pytest.mark.parametrize(
    "elsewhere, ended",
    [({"host": "another"}, None), ({"namespace": "pid:[1]"}, None), ({"boot": "an earlier one"}, True), ({}, False)],
)
def test_owner_pid_is_checked_only_on_same_host(elsewhere, ended):
    assert lease_of(**elsewhere).owner_ended is ended


def test_missing_heartbeat_makes_runtime_leftover():
    assert lease_of(age=59.0, host="another").describe_abandonment() is None
    assert lease_of(id="lease-2", age=61.0, host="another").describe_abandonment() == "no heartbeat for 61 s"
    assert lease_of(id="lease-3", age=61.0).describe_abandonment() == "no heartbeat for 61 s"


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("/tmp", path)], ids=["name", "link"])
def test_only_folders_of_sandboxes_are_deleted(tmp_path, make):
    folder = tmp_path / ("mine" if make is os.mkdir else "skyrl-sandbox-x")
    make(folder)
    lease = lease_of(folder=str(folder), age=100.0)
    with pytest.raises(InfraError, match="and is kept"):
        remove(lease)
    assert remove_leftovers()[1].keys() == {"lease-1"}
    assert os.path.lexists(folder)


def test_incomplete_lease_file_is_removed_after_delay(folder):
    folder.mkdir()
    for name, age in (("new", 0), ("old", 100)):
        (folder / f"{name}.json").write_text('{"id": "a')
        os.utime(folder / f"{name}.json", (time.time() - age,) * 2)
    assert leases() == []
    assert os.listdir(folder) == ["new.json"]


def test_unwritable_folder_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "leases"))
    with pytest.raises(InfraError, match=f"{FOLDER_VARIABLE}.*"):
        Lease.take("one", "local", 1.0)


async def test_heartbeats_run_outside_event_loop():
    heart, lease = LeaseRenewal(), Lease.take("one", "local", 0.2)
    os.utime(lease.path, (0, 0))
    heart.hold(lease)
    deadline = time.monotonic() + 30
    beats = set()
    while len(beats) < 3 and time.monotonic() < deadline:  # this blocks the loop
        beats.add(lease.path.stat().st_mtime)
        time.sleep(0.02)
    assert len(beats) == 3
    heart.drop(lease)
    lease.release()


@pytest.mark.usefixtures("needs_sandbox")
async def test_runtime_reports_expired_lease():
    runtime = make_runtime(RuntimeSpec(lease_seconds=7.0))
    await runtime.start()
    (lease,) = leases()
    lease.release()  # as a sweep does while its owner is stopped
    with pytest.raises(InfraError, match="7 s"):
        await runtime.exec("true")
    await runtime.close()


def test_gc_lists_and_removes_only_leftovers(capsys):
    assert gc.main([]) == 0
    assert "no leases in" in capsys.readouterr().out
    used, left = workspace(), workspace()
    lease_of(id="used", folder=used)
    lease_of(id="left", folder=left, age=100.0)
    assert gc.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {row["id"]: row["left_behind"] for row in said["leases"]} == {"used": None, "left": "no heartbeat for 100 s"}
    assert said["removed"] == [] and os.path.isdir(left)
    assert gc.main([]) == 0
    assert "orphaned: no heartbeat" in capsys.readouterr().out
    assert gc.main(["--remove"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "removed" in said[0] and "in use" in said[1]
    assert not os.path.exists(left) and os.path.isdir(used)
    assert [lease.id for lease in leases()] == ["used"]
    lease_of(id="left", age=100.0)
    removed, failed = remove_leftovers()
    assert [lease.id for lease in removed] == ["left"] and failed == {}
    os.rmdir(used)


def test_gc_exits_with_one_when_removal_fails(tmp_path, capsys):
    lease_of(folder=str(tmp_path), age=100.0)
    assert gc.main(["--remove"]) == 1
    assert "is not a sandbox folder" in capsys.readouterr().out
