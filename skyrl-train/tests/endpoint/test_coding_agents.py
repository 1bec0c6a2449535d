"""Claude Code and Codex CLI, unchanged and without an account, against the endpoint. They are found on the PATH
(`npm install @anthropic-ai/claude-code @openai/codex`)."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skyrl_train.endpoint.recorder import RequestRecorder, is_continuation
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train_testing.scripted_engine import PromptScriptEngine

CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "echo %s > %s.txt"%s}}\n</tool_call>'
TASK = "Write hi to one.txt and to two.txt"
CODEX_SETTINGS = """
model = "tiny"
model_provider = "skyrl"
model_context_window = 100000
web_search = "disabled"

[model_providers.skyrl]
name = "skyrl"
base_url = "{url}"
env_key = "SKYRL_KEY"
wire_api = "responses"
"""


def script_of(tool: str, argument: str, more: str):
    """Think, call the tool twice at once, read the results, and end."""

    def script(prompt: str) -> str:
        # The newest messages alone: the descriptions of the tools quote the tags too.
        if "</tool_response>" in prompt.rpartition("<|im_start|>user")[2]:
            return "<think>\nBoth are written.\n</think>\n\nDone."
        calls = [CALL % (tool, argument, "hi", name, more) for name in ("one", "two")]
        return "<think>\nTwo files.\n</think>\n\nI write both.\n" + "\n".join(calls)

    return script


async def run(program: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run an agent in a folder with nothing else of this environment. Returns: its output."""
    settings = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TERM": "dumb"} | environment
    (folder / "work").mkdir()
    process = await asyncio.create_subprocess_exec(
        *program,
        cwd=folder / "work",
        env=settings,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.full
@pytest.mark.parametrize("agent", ["claude", "codex"])
async def test_unmodified_coding_agent_is_recorded_as_single_chain(agent, tmp_path, test_data):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")
    template = test_data / "tokenizers" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja"
    tokenizer.chat_template = template.read_text()
    script = script_of("Bash", "command", "") if agent == "claude" else script_of("exec_command", "cmd", "")
    recorder = RequestRecorder()
    engine = PromptScriptEngine(tokenizer, script, max_model_len=100_000)
    server = EndpointServer(engine, tokenizer, "tiny", recorder=recorder, api_key="secret")
    await server.start()
    try:
        key, url = server.session_key("job"), server.url
        if agent == "claude":
            environment = {
                "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": key,
                "ANTHROPIC_MODEL": "tiny",
                "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            }
            output = await run(["claude", "-p", TASK, "--allowedTools", "Bash"], tmp_path, environment)
        else:
            (tmp_path / "home" / ".codex").mkdir(parents=True)
            (tmp_path / "home" / ".codex" / "config.toml").write_text(CODEX_SETTINGS.format(url=url))
            program = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
            output = await run(program, tmp_path, {"SKYRL_KEY": key})
    finally:
        await server.stop()
    assert "Done." in output
    assert [(tmp_path / "work" / f"{name}.txt").read_text() for name in ("one", "two")] == ["hi\n", "hi\n"]
    first, second = recorder.take("job")
    assert is_continuation(second, first)
    assert tokenizer.decode(second.response_ids) == "<think>\nBoth are written.\n</think>\n\nDone.<|im_end|>"
