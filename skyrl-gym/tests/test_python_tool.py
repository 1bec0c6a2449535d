import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Limits, make_sandbox
from skyrl_gym.tools import PythonCodeExecutorToolGroup

from .sandboxed import sandboxed, without_sandbox


@pytest.fixture
def python():
    group = PythonCodeExecutorToolGroup(timeout=5.0)
    yield group
    group.close()


@sandboxed
@pytest.mark.parametrize(
    "code, printed",
    [
        ("print('hello world')", "hello world"),
        ("print(1 + 1)", "2"),
        ("x = 1", ""),
        ("import sys\nprint('a')\nsys.exit(3)", "a"),
        ("print(__name__)", "__main__"),
        ("print('\\ud800'.encode('utf-8', 'replace'))", "b'?'"),
        ("print('é')", "é"),
    ],
)
def test_tool_returns_program_output(python, code, printed):
    assert python.python(code) == printed


@sandboxed
def test_errors_include_traceback(python):
    error = python.python("print('before')\n1 / 0")
    assert error.startswith(
        'Error executing Python code: Traceback (most recent call last):\n  File "<string>", line 2, in'
    )
    assert error.endswith("\nZeroDivisionError: division by zero")
    # Anything on standard error counts as one.
    assert (
        python.python("import sys\nprint(1)\nprint('careful', file=sys.stderr)")
        == "Error executing Python code: careful"
    )
    assert "SyntaxError" in python.python("print(")


@sandboxed
def test_limit_violations_are_reported_to_model():
    short = PythonCodeExecutorToolGroup(timeout=1.0)
    assert short.python("while True: pass") == "Error executing Python code: the code ran longer than 1 seconds"
    short.close()
    group = PythonCodeExecutorToolGroup(timeout=60.0)
    assert group.python("print('x' * (2 << 20))").startswith("Error executing Python code: the code printed too much")
    assert group.python("import os\nos.kill(os.getpid(), 11)").endswith("signal 11")
    assert group.python("print(1)") == "1"  # the next call works
    group.close()


@sandboxed
@pytest.mark.parametrize("code", ["a\0b", "#" * 200_000, "x = '\ud800'", "", "print(open('/etc/shadow').read())"])
def test_no_model_text_raises(python, code):
    assert isinstance(python.python(code), str)


@sandboxed
def test_files_persist_until_group_is_closed(python):
    assert python.python("open('notes', 'w').write('kept')") == ""
    assert python.python("print(open('notes').read())") == "kept"
    python.close()
    python.close()
    assert "FileNotFoundError" in python.python("open('notes')")  # a new sandbox


@sandboxed
def test_given_sandbox_is_not_closed():
    with make_sandbox(limits=Limits(wall_seconds=20)) as sandbox:
        sandbox.write("data", "42")
        group = PythonCodeExecutorToolGroup(sandbox=sandbox)
        assert group.python("print(open('data').read())") == "42"
        group.close()
        assert sandbox.read("data") == b"42"


@sandboxed
def test_network_is_unavailable(python):
    assert "OSError" in python.python("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=2)")


def test_broken_sandbox_raises_infra_error(monkeypatch):
    without_sandbox(monkeypatch)
    group = PythonCodeExecutorToolGroup()
    with pytest.raises(InfraError, match="Docker does not run"):
        group.call("python", {"code": "print(1)"})


def test_tool_schema():
    (schema,) = PythonCodeExecutorToolGroup().schemas()
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert "Print what you want to see" in schema["function"]["description"]
