"""Python that a model wrote, in a runtime of the tool's own and in the trajectory's."""

import os

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes import RuntimeSpec, make_runtime
from skyrl_agent.tools import make_tool

from .agent_web_server import context_of

pytestmark = pytest.mark.usefixtures("needs_sandbox")


@pytest.fixture(autouse=True)
def leases(monkeypatch, tmp_path):
    monkeypatch.setenv("SKYRL_AGENT_LEASES", str(tmp_path / "leases"))


@pytest.mark.parametrize("name", ["code_interpreter", "python"])
async def test_python_programs_return_output(name):
    """One tool for all of them, as a start takes longer than a program."""
    tool, context = make_tool(name, {"timeout": 10.0}), context_of()

    async def run(code: str):
        return await tool.call(context, {"code": code})

    try:
        for code, said in [
            ("x = 6 * 7\nx", "42"),
            ("print('a')\n'b'", "a\n'b'"),
            ("x = 1\nif x:\n    x", "The program ran without error and printed nothing. Print what you want to see."),
            ("[n for n in range(3)]  # a comment", "[0, 1, 2]"),
            ("print('printed')", "printed"),
            ("None", "The program ran without error and printed nothing. Print what you want to see."),
            ("```python\n1 + 1\n```", "2"),
            (
                "import sys; sys.exit(0)",
                "The program ran without error and printed nothing. Print what you want to see.",
            ),
            ("from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int = 1\nA()", "A(b=1)"),
            ("open('kept', 'w').write('text')", "4"),
            ("open('kept').read()", "'text'"),
            ("'half \ud800'", "'half ?'"),
        ]:
            output = await run(code)
            assert (output.text, output.failed) == (said, False), code

        failed = await run("def f():\n    return 1 / 0\nf()")
        assert failed.failed
        assert failed.text.splitlines() == [
            "Traceback (most recent call last):",
            '  File "<program>", line 3, in <module>',
            "    f()",
            '  File "<program>", line 2, in f',
            "    return 1 / 0",
            "           ~~^~~",
            "ZeroDivisionError: division by zero",
        ]
        wrong = await run("x = = 1")
        assert wrong.failed and "SyntaxError: invalid syntax" in wrong.text and "x = = 1" in wrong.text
        assert "exit status 3" in (await run("import sys; sys.exit(3)")).text
        assert "printed\n" in (await run("print('printed')\nraise ValueError('then this')")).text
    finally:
        await tool.close()
        await tool.close()


async def test_hanging_program_times_out():
    tool = make_tool("code_interpreter", {"timeout": 3.0})
    output = await tool.call(context_of(), {"code": "print('begun', flush=True)\nwhile True: pass"})
    await tool.close()
    assert output.failed and output.text.startswith("begun\nError: the program was ended: it ")


async def test_program_runs_in_agent_runtime():
    async with make_runtime(RuntimeSpec(files={"data.txt": "from the task"})) as runtime:
        tool = make_tool("python")
        output = await tool.call(context_of(runtime=runtime), {"code": "open('data.txt').read()"})
        await tool.close()
        assert output.text == "'from the task'"
        assert (await runtime.exec("cat data.txt")).ok  # it is the trajectory's to close


async def test_other_language_is_rejected():
    output = await make_tool("code_interpreter").call(context_of(), {"code": "1", "language": "R"})
    assert output.failed and "language must be python; got 'R'" in output.text


@pytest.mark.parametrize("runtime", [{"kind": "vm"}, {"knid": "local"}, {"token_env": "NO_SUCH_VARIABLE"}])
def test_execution_location_is_checked_at_construction(runtime):
    with pytest.raises(ConfigError, match="runtime"):
        make_tool("python", {"runtime": runtime})


def test_runtime_needs_no_environment_variables():
    assert "SANDBOX_FUSION_URL" not in os.environ
    make_tool("code_interpreter")
