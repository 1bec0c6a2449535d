"""A shell as the model has it."""

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes import Runtime
from skyrl_agent.tools.base import ToolContext, make_tool
from skyrl_agent.tools.bash import Bash, readable


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


async def test_command_that_reads_input_gets_none_and_ends(call):
    assert await said(call, Bash(), "cat; read answer; echo \"[$answer]\"; python3 -c 'input()' 2>&1 | tail -1") == (
        "[]\nEOFError: EOF when reading a line\n[exit code 0]"
    )


async def test_a_command_that_takes_too_long_is_ended_and_changes_no_directory(call):
    bash = Bash(timeout=30, max_timeout=40)
    output = await call(bash, command="cd /tmp; echo begun; sleep 60", timeout=3)
    assert output.failed
    assert output.text.startswith("begun\n[ended: it took longer than 3 seconds (timeout: at most 40)")
    assert await said(call, bash, "pwd") == "/workspace\n[exit code 0]"


async def test_no_command_may_ask_for_more_than_the_ceiling(call):
    output = await call(Bash(timeout=0.5, max_timeout=1), command="sleep 60", timeout=3600)
    assert output.text.startswith("[ended: it took longer than 1 seconds")


async def test_background_process_ends_with_the_call(call):
    bash = Bash()
    assert await said(call, bash, "sleep 300 & echo $! >pid; echo started") == "started\n[exit code 0]"
    assert "gone" in await said(call, bash, 'kill -0 "$(cat pid)" 2>/dev/null || echo gone')


async def test_endless_output_is_ended_with_advice(call):
    output = await call(Bash(), command="yes")
    assert output.failed and output.text.startswith("y\ny\n")
    assert output.text.endswith("Working directory and variables are as before the command.]")


async def test_a_directory_that_is_gone_is_told(call):
    bash = Bash()
    await said(call, bash, "mkdir x; cd x")
    await said(call, bash, "rmdir ../x")
    assert (
        await said(call, bash, "pwd")
        == "[the working directory is gone; back in /workspace]\n/workspace\n[exit code 0]"
    )


async def test_a_signal_is_named(call):
    assert await said(call, Bash(), "kill -SEGV $$") == "[ended by signal 11 (SIGSEGV)]"


async def test_a_command_may_be_long(call):
    text = "x" * 300_000
    assert await said(call, Bash(), f"cat >file <<'END'\n{text}\nEND\nwc -c <file") == "300001\n[exit code 0]"


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


async def test_a_zero_character_is_refused_with_a_reason(call):
    output = await call(Bash(), command="echo a\0b")
    assert output.failed and "zero character" in output.text


async def test_missing_runtime_is_a_config_error():
    with pytest.raises(ConfigError, match="bash works in a runtime, and the task gives none"):
        await Bash().open(ToolContext("trajectory", {}))


@pytest.mark.parametrize("settings", [{"timeout": 0}, {"timeout": 20, "max_timeout": 10}])
def test_impossible_times_are_refused(settings):
    with pytest.raises(ConfigError, match="timeout must be above 0 and at most max_timeout"):
        make_tool("bash", settings)


async def test_the_agent_waits_longer_than_the_longest_command(runtime: Runtime):
    assert Bash(max_timeout=600).timeout_seconds > 600
