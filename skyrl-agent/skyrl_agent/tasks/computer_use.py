"""Browser tasks on a site included in the row.

A row has `instruction`, `files` ({path: text}: pages, scripts, styles) and `start` (`index.html`), and is graded by
`check`, JavaScript that must be true in the last page (`() => document.title === "Sent"`), or by `expected_output`, the
expected response.

A browser is an environment: created once, lent to one trajectory at a time. `dispatcher.type` must be `async_fix_pool`;
`num_environments` is the number of browsers.
"""

from collections.abc import Mapping

from skyrl_agent.errors import ConfigError
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement, TaskRowError
from skyrl_agent.tasks.browser_page import BrowserPage
from skyrl_agent.tasks.rows import from_json, remove_nulls
from skyrl_agent.types import JsonObject, Message, TrajectoryResult

SYSTEM = """You use a browser. The tool `page` shows the page as text, with numbers at what can be clicked or filled \
in, and acts on it. There is no network beyond this site."""


class ComputerUseTask(BaseTask):
    """Task in a browser; the dispatcher supplies the pages."""

    tools = ("page", "finish")

    async def make_environment(self, place: int) -> BrowserPage:
        return await BrowserPage.open()

    async def close_environment(self, environment: BrowserPage) -> None:
        await environment.close()

    def check_row(self, instance: Instance) -> None:
        row = instance.row

        def wrong(what: str) -> TaskRowError:
            return TaskRowError(f"ComputerUseTask, row {instance.instance_id}: {what}")

        if not row.get("instruction"):
            raise wrong("instruction must not be empty")
        files = parse_files(instance)
        start = row.get("start") or "index.html"
        if start not in files:
            raise wrong(f"files must contain the page {start!r}; found: {', '.join(files) or 'none'}")
        if (row.get("check") is None) == (row.get("expected_output") is None):
            raise wrong("either check or expected_output is required to grade the row")

    def get_instruction(self, instance: Instance) -> list[Message]:
        text = (
            f"{instance.row['instruction']}\n\nCall the finish tool when it is done, with the answer if there is one."
        )
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

    async def initialize_runtime(self, instance: Instance, runtime: object) -> None:
        await get_page(runtime).show(parse_files(instance), instance.row.get("start") or "index.html")

    async def complete_runtime(self, instance: Instance, runtime: object, result: object) -> JsonObject:
        if instance.row.get("check") is None:
            return {"answer": result}
        try:
            passed = await get_page(runtime).run(instance.row["check"]) is True
        except ValueError:  # the check cannot run on the agent's last page
            passed = False
        return {"answer": result, "passed": passed}

    async def evaluate_result(
        self, result: JsonObject | None, instance: Instance, trajectory: TrajectoryResult, runtime: object = None
    ) -> Judgement:
        result = result or {}
        if instance.row.get("check") is not None:
            return Judgement(float(result.get("passed", False)))
        answer = str(result.get("answer") or "")
        return Judgement(float(answer.strip() == str(instance.row["expected_output"]).strip()))


def parse_files(instance: Instance) -> Mapping[str, str]:
    return remove_nulls(from_json(instance.row.get("files") or {}))


def get_page(runtime: object) -> BrowserPage:
    """
    Raises:
        ConfigError: the dispatcher lends no browsers.
    """
    if not isinstance(runtime, BrowserPage):
        raise ConfigError("computer use needs a pool of browsers: set dispatcher.type to async_fix_pool")
    return runtime
