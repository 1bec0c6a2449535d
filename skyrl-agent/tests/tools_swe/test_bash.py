"""A shell as the model has it."""

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import ToolContext
from skyrl_agent.tools.bash import Bash, render_terminal
from skyrl_agent.tools.factory import make_tool

GONE = "[the working directory is gone; back in /workspace]\n/workspace\n[exit code 0]"


async def said(call, tool: Bash, command: str, **arguments) -> str:
    return (await call(tool, command=command, **arguments)).text


async def test_directory_and_exported_variables_persist(call):
    bash = Bash()
    await said(call, bash, "mkdir -p a/b && cd a/b && export GREETING='two\nlines \"é\"' PRIVATE=1 && local=2")
    assert await said(call, bash, 'basename "$PWD"; echo "$GREETING$local"') == 'b\ntwo\nlines "é"\n[exit code 0]'
    await said(call, bash, "unset PRIVATE")
    assert await said(call, bash, 'echo "${PRIVATE-none}"; cd ..') == "none\n[exit code 0]"
    assert await said(call, bash, 'basename "$PWD"') == "a\n[exit code 0]"


@pytest.mark.parametrize(
    "leaving", ["exit 7", "set -e; (exit 7)", "set -u; trap '' INT; exit 7", "echo 'x\ny' >/dev/null; exit 7"]
)
async def test_exit_in_command_is_reported_and_keeps_state(call, leaving):
    bash = Bash()
    assert (await said(call, bash, f"cd /tmp; export KEPT=1; {leaving}; echo not reached")).endswith("[exit code 7]")
    assert await said(call, bash, "echo $PWD $KEPT") == "/tmp 1\n[exit code 0]"


async def test_shells_share_only_files(call):
    first, second = Bash(), Bash()
    await said(call, first, "mkdir inner; cd inner; export SECRET=1; touch here")
    assert await said(call, second, 'echo "${SECRET-none}"; ls') == "none\ninner\n[exit code 0]"


async def test_error_line_numbers_are_relative_to_command(call):
    assert "line 2: nosuchcommand" in await said(call, Bash(), "true\nnosuchcommand")
    assert "line 2: syntax error" in await said(call, Bash(), "true\necho (")


READS = "cat; read answer; echo \"[$answer]\"; python3 -c 'input()' 2>&1 | tail -1"
LONG = f"cat >file <<'END'\n{'x' * 300_000}\nEND\nwc -c <file"
BACKGROUND = ("sleep 300 & echo $! >pid; echo started", 'kill -0 "$(cat pid)" 2>/dev/null || echo gone')


@pytest.mark.parametrize(
    "commands, outputs",
    [
        ([READS], ["[]\nEOFError: EOF when reading a line\n[exit code 0]"]),  # it gets no input, and ends
        (["kill -SEGV $$"], ["[ended by signal 11 (SIGSEGV)]"]),
        ([LONG], ["300001\n[exit code 0]"]),
        (BACKGROUND, ["started\n[exit code 0]", "gone\n[exit code 0]"]),  # it ends with the call
        (["mkdir x; cd x", "rmdir ../x", "pwd"], [GONE]),
    ],
    ids=["input", "signal", "long", "background", "no directory"],
)
async def test_command_outputs(call, commands, outputs):
    bash = Bash()
    found = [await said(call, bash, command) for command in commands]
    assert found[-len(outputs) :] == outputs


async def test_timed_out_command_keeps_directory(call):
    bash = Bash(timeout=30, max_timeout=40)
    output = await call(bash, command="cd /tmp; echo begun; sleep 60", timeout=3)
    assert output.failed
    assert output.text.startswith("begun\n[ended: it took longer than 3 seconds (timeout: at most 40)")
    assert await said(call, bash, "pwd") == "/workspace\n[exit code 0]"
    output = await call(Bash(timeout=0.5, max_timeout=1), command="sleep 60", timeout=3600)
    assert output.text.startswith("[ended: it took longer than 1 seconds")


async def test_endless_output_is_stopped_and_nul_character_rejected(call):
    output = await call(Bash(), command="yes")
    assert output.failed and output.text.startswith("y\ny\n")
    assert output.text.endswith("Working directory and variables are as before the command.]")
    refused = await call(Bash(), command="echo a\0b")
    assert refused.failed and "zero character" in refused.text


@pytest.mark.parametrize(
    "output, shown",
    [
        ("\x1b[1;31mred\x1b[0m and \x1b]0;title\x07plain\n", "red and plain\n"),
        ("10%\r50%\r100%\r\ndone\r\n", "100%\ndone\n"),
        ("tab\tstays\n", "tab\tstays\n"),
        ("a bell \x07 in a long line of text", "a bell \ufffd in a long line of text"),
        ("\ufffd\0ELF" * 10, "[50 characters of binary output, not shown]"),
        ("", ""),
    ],
)
def test_output_is_rendered_as_terminal_shows_it(output, shown):
    assert render_terminal(output) == shown


async def test_missing_runtime_and_invalid_timeouts_raise_config_error():
    with pytest.raises(ConfigError, match="bash"):
        await Bash().open(ToolContext("trajectory", {}))
    for settings in ({"timeout": 0}, {"timeout": 20, "max_timeout": 10}):
        with pytest.raises(ConfigError, match="max_timeout"):
            make_tool("bash", settings)
    assert Bash(max_timeout=600).timeout_seconds > 600  # the agent waits longer than the longest command
