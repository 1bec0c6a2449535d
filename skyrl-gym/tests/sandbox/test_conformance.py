"""Promises of the sandbox protocol, on every kind of sandbox that works here."""

import copy
import json
import os
import signal
import sys
import threading
import time
import uuid
from unittest.mock import ANY

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import ExecResult, Limits, Sandbox, make_sandbox, rlimits
from skyrl_gym.sandbox.environment import CARRIER

from ..sandboxed import processes_with

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
ANSWERING = """
import sys
while True:
    try:
        print(eval(sys.stdin.readline()), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
AT_THE_LIMIT = {"limits": Limits(output_bytes=9)}


def python(sandbox: Sandbox, source: str, *arguments: str) -> list[str]:
    return [sandbox.python, "-I", "-S", "-c", source, *arguments]


BY_NAME = "cat /dev/stdin >/dev/stdout; echo err >/dev/stderr"


@pytest.mark.parametrize(
    "command, options, expected",
    [
        ("print(input()[::-1])", {"stdin": "très\n"}, ("exited", 0, "sèrt\n", "")),
        ("import os; os.write(1, b'a\\xffb')", {}, ("exited", 0, "a�b", "")),
        (["sh", "-c", "echo out; echo err >&2; exit 3"], {}, ("exited", 3, "out\n", "err\n")),
        (["sh", "-c", BY_NAME], {"stdin": "in"}, ("exited", 0, "in", "err\n")),
        (["true"], {"stdin": b"x" * 10_000_000}, ("exited", 0, "", "")),  # nobody reads it
        *((["sh", "-c", f"exit {code}"], {}, ("exited", code, "", "")) for code in (0, 1, 7, 42, 126, 127, 128, 255)),
        *((f"import os; os.kill(os.getpid(), {n})", {}, ("exited", -n, "", "")) for n in (1, 6, 9, 11, 15)),
        (["sh", "-c", "echo begun; sleep 60"], {"limits": Limits(wall_seconds=0.5)}, ("wall_time", -9, "begun\n", "")),
        ("while True: pass", {"limits": Limits(wall_seconds=30, cpu_seconds=1)}, ("cpu_time", ANY, "", "")),
        (["yes"], {"limits": Limits(output_bytes=1000)}, ("output", ANY, "y\n" * 500, "")),
        (["sh", "-c", "printf 12345; printf 123456789 >&2"], AT_THE_LIMIT, ("exited", 0, "12345", "123456789")),
    ],
)
def test_exec_returns_output_and_exit_code(sandbox, command, options, expected):
    result = sandbox.exec(python(sandbox, command) if isinstance(command, str) else command, **options)
    assert (result.outcome, result.returncode, result.stdout, result.stderr) == expected
    assert result.ok == (expected[:2] == ("exited", 0)) and 0 < result.wall_seconds < 20


def test_arguments_arrive_as_they_are(sandbox):
    arguments = ["a b", "'", '"', "$HOME", "*", "\\", "", "é", "-x", "a=b"]
    result = sandbox.exec(python(sandbox, "import sys; print(ascii(sys.argv[1:]))", *arguments))
    assert result.stdout.strip() == ascii(arguments)


def test_command_environment_is_only_given_variables(sandbox, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    result = sandbox.exec(
        python(sandbox, "import os; print(dict(os.environ))"), env={"COLOUR": "dark blue", "E": "a=b"}
    )
    assert "'COLOUR': 'dark blue'" in result.stdout
    assert "'E': 'a=b'" in result.stdout
    assert "hunter2" not in result.stdout


def test_variable_values_are_exact_and_not_on_command_line(sandbox):
    """Every user of the machine can read command lines, and a variable may be a key."""
    key = f"key-{uuid.uuid4().hex}"
    texts = {"QUOTES": "'\"\\$(id)`id`\n\t' é\u4e2d ", "LONG": "\u4e2d" * 40_000, "EMPTY": "", "UID": "77", "SH": "-c"}
    program = "import os, json; print(json.dumps(dict(os.environ)), flush=True); input()"
    process = sandbox.popen(python(sandbox, program), env={"KEY": key, **texts})
    seen = json.loads(process.stdout.readline())
    assert processes_with(key, "environ"), "nothing has the key: this test shows nothing"
    assert processes_with(key) == []
    process.stdin.close()
    process.wait(timeout=30)
    assert {name: seen[name] for name in texts} == texts and seen["KEY"] == key
    assert not [name for name in seen if name.startswith(CARRIER)]


@pytest.mark.parametrize("env", [{"A": "a\0--bind\0/\0/host"}, {"A=B": "c"}, {"A": "a" * (3 << 20)}])
def test_invalid_variable_starts_no_command(sandbox, env):
    assert sandbox.exec(["sh", "-c", "echo ran"], env=env) == ExecResult("exited", 126, "", ANY, 0.0)


def test_variables_affect_only_the_command(walled):
    """Programs that start the command have rights that it has not, and read none of its variables."""
    walled.write("sh", "#!/bin/sh\necho mine >>/workspace/started\n")
    path = {"PATH": "/workspace", "LD_PRELOAD": "/workspace/none.so", "LD_DEBUG": "all"}
    result = walled.exec(["/bin/sh", "-c", "echo $PATH"], env=path)
    assert result.stdout == "/workspace\n"
    with pytest.raises(FileNotFoundError):
        walled.read("started")
    assert "setpriv" not in result.stderr and "prlimit" not in result.stderr


def test_missing_command_returns_result(sandbox):
    result = sandbox.exec(["no-such-program"])
    assert (result.outcome, result.returncode) == ("exited", 127)
    assert "no-such-program" in result.stderr


@pytest.mark.parametrize("argument", ["a\0b", "x" * 10_000_000], ids=["zero byte", "ten megabytes"])
def test_unstartable_command_returns_result(sandbox, argument):
    assert sandbox.exec(["echo", argument]).returncode == 126


def test_lone_surrogate_in_code_reaches_interpreter(sandbox):
    assert sandbox.exec(python(sandbox, "print('\ud800')")).outcome == "exited"


IGNORED = "import signal; print([s.name for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN])"


@pytest.mark.parametrize("with_new_env", [True, False], ids=["env", "an env that cannot reset signals"])
def test_command_does_not_inherit_ignored_signals(sandbox, monkeypatch, with_new_env):
    if not with_new_env:
        reset = [sys.executable, "-I", "-S", "-c", rlimits.RESET_SIGNALS]
        monkeypatch.setattr(rlimits, "_find_signal_resetter", lambda: reset)
    kinds = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
    before = {kind: signal.signal(kind, signal.SIG_IGN) for kind in kinds}
    try:
        killed = sandbox.exec(python(sandbox, "import os; os.kill(os.getpid(), 1)"))
        ignored = sandbox.exec(python(sandbox, IGNORED))
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    assert (killed.outcome, killed.returncode) == ("exited", -1)
    assert ignored.stdout == "['SIGPIPE', 'SIGXFSZ']\n"  # as any Python has it


def test_ten_megabytes_pass_without_deadlock(sandbox):
    limits = Limits(wall_seconds=30.0, output_bytes=20 << 20)
    text = "0123456789" * (1 << 20)
    result = sandbox.exec(["cat"], stdin=text, limits=limits)
    assert result.stdout == text


def test_commands_share_workspace_and_start_in_workspace(sandbox):
    assert sandbox.exec(["sh", "-c", "mkdir a && echo 1 > a/b && pwd > here"]).ok
    sandbox.write("a/c.txt", "two\n")
    assert sandbox.exec(["cat", "a/b", "a/c.txt"]).stdout == "1\ntwo\n"
    assert sandbox.read("a/b") == b"1\n"


def test_read_and_write_share_files_with_commands(sandbox):
    sandbox.write("x", b"\x00\xff")
    assert sandbox.exec(["sh", "-c", "echo more >> x; echo mine > y"]).ok
    assert sandbox.read("x") == b"\x00\xffmore\n"
    sandbox.write("y", "yours")
    assert sandbox.read("y") == b"yours"
    for path in ("nothing", "no/folder"):
        with pytest.raises(FileNotFoundError):
            sandbox.read(path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"])
def test_path_outside_workspace_is_rejected(sandbox, path):
    with pytest.raises(ValueError, match="workspace"):
        sandbox.read(path)
    with pytest.raises(ValueError, match="workspace"):
        sandbox.write(path, "x")


def test_two_sandboxes_do_not_see_each_others_files(sandbox):
    other = copy.copy(sandbox)
    other._workspace = None  # pyright: ignore[reportAttributeAccessIssue]
    with other:
        other.write("mine", "x")
        with pytest.raises(FileNotFoundError):
            sandbox.read("mine")


def test_memory_limit_raises_memory_error_in_process(sandbox):
    result = sandbox.exec(python(sandbox, "x = bytearray(1 << 30)"), limits=Limits(memory_bytes=256 << 20))
    assert "MemoryError" in result.stderr


def test_running_command_accepts_input_and_interrupt(sandbox):
    process = sandbox.popen(python(sandbox, ANSWERING))
    process.stdin.write(b"6 * 7\n")
    assert process.stdout.read(100) == b"42\n"
    process.stdin.write(b"__import__('time').sleep(60)\n")
    time.sleep(0.3)
    process.interrupt()
    assert process.stdout.read(100) == b"interrupted\n"
    process.stdin.write(b"'still here'\n")
    assert process.stdout.read(100) == b"still here\n"
    with pytest.raises(TimeoutError):
        process.wait(timeout=0.05)
    process.kill()
    process.kill()
    assert process.wait(timeout=5).returncode == -9
    assert process.stdout.read(100) == b""


def test_closing_input_ends_running_command(sandbox):
    process = sandbox.popen(["sh", "-c", "cat; echo bad >&2; exit 4"])
    process.stdin.write(b"hello")
    process.stdin.close()
    result = process.wait(timeout=10)
    assert (result.outcome, result.returncode, result.stdout, result.stderr) == ("exited", 4, "", "bad\n")
    assert process.stdout.read(100) == b"hello"
    assert process.wait() == result


def test_running_command_outlives_starting_thread(sandbox):
    started = []
    thread = threading.Thread(target=lambda: started.append(sandbox.popen(python(sandbox, ECHO))))
    thread.start()
    thread.join()
    time.sleep(0.1)
    started[0].stdin.write(b"alive\n")
    assert started[0].stdout.read(100) == b"ALIVE\n"


def test_commands_run_concurrently(sandbox):
    process = sandbox.popen(python(sandbox, ECHO))
    assert sandbox.exec(["sh", "-c", "sleep 60 & echo done"]).stdout == "done\n"
    process.stdin.write(b"a\n")
    assert process.stdout.read(100) == b"A\n"


def test_running_command_is_limited_and_close_is_idempotent(sandbox):
    asleep = sandbox.popen(["sleep", "60"], limits=Limits(wall_seconds=0.3))
    assert asleep.wait(timeout=10).outcome == "wall_time"
    process = sandbox.popen(["sleep", "60"])
    sandbox.close()
    sandbox.close()
    assert process.wait(timeout=5).returncode == -9
    with pytest.raises(InfraError, match="not started, or closed"):
        sandbox.exec(["true"])


def test_unclosed_sandbox_is_cleaned_up():
    sandbox = make_sandbox("process")
    sandbox.start()
    sandbox.write("x", "")
    folder = sandbox.exec(["pwd"]).stdout.strip()
    assert os.path.isdir(folder)
    process = sandbox.popen(["sleep", "60"])
    del sandbox
    assert not os.path.exists(folder)
    assert process.wait(timeout=5).returncode == -9
