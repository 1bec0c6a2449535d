"""A shell as the model has it."""

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import ToolContext
from skyrl_agent.tools.bash import Bash, readable
from skyrl_agent.tools.factory import make_tool

GONE = "[the working directory is gone; back in /workspace]\n/workspace\n[exit code 0]"


async def said(call, tool: Bash, command: str, **arguments) -> str:
    return (await call(tool, command=command, **arguments)).text


async def test_directory_and_exported_variables_stay(call):
    bash = Bash()
    await said(call, bash, "mkdir -p a/b && cd a/b && export GREETING='two\nlines \"é\"' PRIVATE=1 && local=2")
    assert await said(call, bash, 'basename "$PWD"; echo "$GREETING$local"') == 'b\ntwo\nlines "é"\n[exit code 0]'
    await said(call, bash, "unset PRIVATE")
    assert await said(call, bash, 'echo "${PRIVATE-none}"; cd ..') == "none\n[exit code 0]"
    assert await said(call, bash, 'basename "$PWD"') == "a\n[exit code 0]"


@pytest.mark.parametrize(
    "leaving", ["exit 7", "set -e; (exit 7)", "set -u; trap '' INT; exit 7", "echo 'x\ny' >/dev/null; exit 7"]
)
async def test_an_exit_in_the_middle_is_told_and_forgets_nothing(call, leaving):
    bash = Bash()
    assert (await said(call, bash, f"cd /tmp; export KEPT=1; {leaving}; echo not reached")).endswith("[exit code 7]")
    assert await said(call, bash, "echo $PWD $KEPT") == "/tmp 1\n[exit code 0]"


async def test_two_shells_have_nothing_in_common_but_files(call):
    first, second = Bash(), Bash()
    await said(call, first, "mkdir inner; cd inner; export SECRET=1; touch here")
    assert await said(call, second, 'echo "${SECRET-none}"; ls') == "none\ninner\n[exit code 0]"


async def test_lines_of_errors_count_from_the_commands_first(call):
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
async def test_commands_and_their_last_outputs(call, commands, outputs):
    bash = Bash()
    found = [await said(call, bash, command) for command in commands]
    assert found[-len(outputs) :] == outputs


async def test_a_command_that_takes_too_long_is_ended_changes_no_directory_and_asks_for_no_more_than_the_ceiling(call):
    bash = Bash(timeout=30, max_timeout=40)
    output = await call(bash, command="cd /tmp; echo begun; sleep 60", timeout=3)
    assert output.failed
    assert output.text.startswith("begun\n[ended: it took longer than 3 seconds (timeout: at most 40)")
    assert await said(call, bash, "pwd") == "/workspace\n[exit code 0]"
    output = await call(Bash(timeout=0.5, max_timeout=1), command="sleep 60", timeout=3600)
    assert output.text.startswith("[ended: it took longer than 1 seconds")


async def test_endless_output_is_ended_with_advice_and_a_zero_character_refused(call):
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
def test_output_is_what_a_terminal_shows_in_the_end(output, shown):
    assert readable(output) == shown


async def test_a_missing_runtime_and_impossible_times_are_config_errors():
    with pytest.raises(ConfigError, match="bash works in a runtime, and the task gives none"):
        await Bash().open(ToolContext("trajectory", {}))
    for settings in ({"timeout": 0}, {"timeout": 20, "max_timeout": 10}):
        with pytest.raises(ConfigError, match="timeout must be above 0 and at most max_timeout"):
            make_tool("bash", settings)
    assert Bash(max_timeout=600).timeout_seconds > 600  # the agent waits longer than the longest command
