"""The search as an agent has it: its engine runs in the runtime."""

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes import Runtime
from skyrl_agent.tools.code_search import CodeSearch, install_search
from skyrl_agent.tools.factory import make_tool

MODULE = "class A:\n    def f(self):\n        return 1\n\n\ndef g():\n    return A().f()\n"


async def test_agent_finds_edits_and_finds_edited_code(call, runtime: Runtime):
    await runtime.write("pkg/m.py", MODULE)
    search = CodeSearch()
    assert "pkg/m.py:A.f  (method, lines 2-3)" in (await call(search, search_terms=["A.f"])).text
    await runtime.write("pkg/m.py", MODULE.replace("def f", "def renamed"))
    assert "pkg/m.py:A.renamed" in (await call(search, search_terms=["renamed"])).text
    assert "nothing has this name" in (await call(search, search_terms=["def f(self)"])).text
    assert (await runtime.exec("ls -A . pkg")).stdout == ".:\npkg\n\npkg:\nm.py\n"


async def test_all_arguments_reach_search(call, runtime: Runtime):
    await runtime.write("m.py", MODULE)
    search = CodeSearch()
    answer = await call(search, search_terms=["A"], relation="callers")
    assert answer.text == "## callers of m.py:A\n  m.py:g  line 7"
    shown = (await call(search, file_path_or_pattern="/workspace/m.py", line_nums=[1])).text
    assert "     7\t    return A().f()" in shown
    assert "return 1" not in (await call(search, search_terms=["A"], format="fold")).text
    for one in ("A", ["A"], '["A"]'):
        assert (await call(search, search_terms=one, relation="callers")).text == answer.text
    assert (await call(search, file_path_or_pattern="m.py", line_nums="1")).text == shown
    assert "--é \"'" in (await call(search, search_terms=["--é \"'"])).text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"search_terms": ["x"], "file_path_or_pattern": "no.py"}, "Error: no file is meant by 'no.py'"),
        ({}, "Error: nothing to search for"),
        ({"search_terms": ["x"], "relation": "friends"}, "must be one of"),
    ],
)
async def test_errors_are_returned_as_text(call, runtime: Runtime, arguments, message):
    await runtime.write("m.py", MODULE)
    output = await call(CodeSearch(), **arguments)
    assert output.failed and message in output.text


async def test_removed_engine_is_reinstalled(call, runtime: Runtime):
    await runtime.write("m.py", MODULE)
    search = CodeSearch()
    await call(search, search_terms=["g"])
    await runtime.exec("rm -rf /tmp/.agent-code-search*")
    assert "m.py:g" in (await call(search, search_terms=["g"])).text


async def test_search_timeout_is_reported(call, runtime: Runtime):
    await runtime.exec(
        'for n in $(seq 200); do for m in $(seq 200); do echo "def f_$m(): g(g(g()))"; done >m$n.py; done'
    )
    search = CodeSearch(timeout=0.2)
    search._folder = await install_search(runtime)
    output = await call(search, search_terms=["f_1"])
    assert output.failed and "wall_time" in output.text


async def test_search_command(runtime: Runtime):
    await runtime.write("m.py", MODULE)
    await install_search(runtime, "/workspace/search")
    shown = await runtime.exec("REPO_PATH=. ./search --search_terms A.f g --format fold")
    assert "m.py:A.f  (method" in shown.stdout and "m.py:g  (function" in shown.stdout
    refused = await runtime.exec("./search --search_terms x --file_path_or_pattern nothing.py")
    assert refused.returncode == 3 and "no file is meant" in refused.stderr


def test_settings_are_validated():
    assert make_tool("code_search", {"root": "repo"}).name == "code_search"
    with pytest.raises(ConfigError, match="max_chars"):
        make_tool("code_search", {"max_chars": 5})
