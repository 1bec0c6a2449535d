"""Tasks in a browser. Those that need one are skipped where there is none."""

import os
import shutil

import pytest

from skyrl_agent.config.task_file import read_task
from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.integrations.base import BACKEND_REGISTRY, Backend, plain_rows, published_output
from skyrl_agent.runner import AgentRunner
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.browser_page import PROGRAM_VARIABLE
from skyrl_agent.tasks.computer_use import ComputerUseTask, get_page
from skyrl_agent.testing import ScriptedModel, byte_tokenizer

from .swe_oracle import call

FORM = """<title>Order</title><form action="sent.html"><label>Name <input name="who"></label>
<select name="size"><option>small</option><option>large</option></select><button>Send</button></form>"""
SENT = """<title>Sent</title><p id="who"></p><script>
document.getElementById("who").innerText = new URLSearchParams(location.search).toString();</script>"""
ROW = {
    "instruction": "Order a large one for Ada.",
    "files": {"index.html": FORM, "sent.html": SENT},
    "check": "() => document.title === 'Sent' && location.search === '?who=Ada&size=large'",
}


@pytest.fixture
def browser(monkeypatch) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs skyrl-agent[browser]")
    program = os.environ.get(PROGRAM_VARIABLE) or shutil.which("chromium") or shutil.which("google-chrome")
    if program:
        monkeypatch.setenv(PROGRAM_VARIABLE, program)
    with sync_api.sync_playwright() as playwright:
        try:
            playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).close()
        except sync_api.Error as error:
            pytest.skip(f"Chromium does not start (playwright install chromium): {error.message.splitlines()[0]}")


def runner(answers, **dispatcher) -> AgentRunner:
    BACKEND_REGISTRY["itself"] = Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output)
    cfg = {
        "task": "skyrl_agent.tasks.computer_use.ComputerUseTask",
        "generator": {"infer_backend": "itself", "max_iterations": 8, "max_prompt_length": 50_000},
        "dispatcher": {"type": "async_fix_pool", "num_environments": 2, **dispatcher},
    }
    tokenizer = byte_tokenizer()
    return AgentRunner(read_task(cfg), ScriptedModel(tokenizer, answers), tokenizer)


@pytest.mark.slow
async def test_agent_fills_in_and_submits_form(browser):
    answers = [
        call("page", action="look"),
        call("page", action="type", number="1", text="Ada"),
        call("page", action="type", number="2", text="large"),
        call("page", action="click", number="3"),
        call("finish", answer="sent"),
    ]
    rows = await runner(answers).rows([ROW] * 5)
    assert rows.traj_rewards == [1.0] * 5


@pytest.mark.slow
async def test_grade_depends_on_page_not_on_claim(browser):
    rows = await runner([call("finish", answer="sent")]).rows([ROW])
    assert (rows.traj_rewards, rows.finish_reasons) == ([0.0], ["FINISH_TOOL"])


def test_missing_browser_pool_names_setting():
    with pytest.raises(ConfigError, match=r"dispatcher\.type"):
        get_page(None)
    with pytest.raises(ConfigError, match=r"dispatcher\.type"):
        runner([call("finish", answer="sent")], type="async_pipeline", num_environments=None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"instruction": ""}, "instruction"),
        ({"start": "home.html"}, "home.html"),
        ({"expected_output": "x"}, "expected_output"),
        ({"check": None}, "expected_output"),
    ],
)
def test_invalid_rows_are_rejected(change, message):
    with pytest.raises(TaskRowError, match=message):
        ComputerUseTask().check_row(Instance(ROW | change, "7"))
