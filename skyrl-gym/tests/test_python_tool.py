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
def test_the_tool_answers_what_a_program_prints(python, code, printed):
    assert python.python(code) == printed


@sandboxed
def test_errors_come_with_the_traceback(python):
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
def test_limits_are_told_to_the_model():
    group = PythonCodeExecutorToolGroup(timeout=1.0)
    assert group.python("while True: pass") == "Error executing Python code: the code ran longer than 1 seconds"
    assert group.python("print('x' * (2 << 20))").startswith("Error executing Python code: the code printed too much")
    assert group.python("import os\nos.kill(os.getpid(), 11)").endswith("signal 11")
    assert group.python("print(1)") == "1"  # and the next call works
    group.close()


@sandboxed
@pytest.mark.parametrize("code", ["a\0b", "#" * 200_000, "x = '\ud800'", "", "print(open('/etc/shadow').read())"])
def test_no_text_that_a_model_writes_raises(python, code):
    assert isinstance(python.python(code), str)


@sandboxed
def test_files_last_until_the_group_is_closed(python):
    assert python.python("open('notes', 'w').write('kept')") == ""
    assert python.python("print(open('notes').read())") == "kept"
    python.close()
    python.close()
    assert "FileNotFoundError" in python.python("open('notes')")  # a new sandbox


@sandboxed
def test_a_sandbox_that_is_given_stays_its_owners():
    with make_sandbox(limits=Limits(wall_seconds=20)) as sandbox:
        sandbox.write("data", "42")
        group = PythonCodeExecutorToolGroup(sandbox=sandbox)
        assert group.python("print(open('data').read())") == "42"
        group.close()
        assert sandbox.read("data") == b"42"


@sandboxed
def test_network_is_unavailable(python):
    assert "OSError" in python.python("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=2)")


def test_a_sandbox_that_does_not_work_is_no_answer_to_the_model(monkeypatch):
    without_sandbox(monkeypatch)
    group = PythonCodeExecutorToolGroup()
    with pytest.raises(InfraError, match="Docker does not run"):
        group.call("python", {"code": "print(1)"})


def test_the_tool_describes_itself():
    (schema,) = PythonCodeExecutorToolGroup().schemas()
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert "Print what you want to see" in schema["function"]["description"]
