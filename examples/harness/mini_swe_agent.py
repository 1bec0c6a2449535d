"""mini-SWE-agent as a function instead of a command: its agent and its model, unchanged, in the trainer's process.

Faster for short tasks, as the package is imported once and not for each trajectory; the model's commands run in the
task's sandbox. The package is one of this Python's, or of the environment that MINI_SWE_AGENT names.

    PYTHONPATH=examples/harness bash examples/harness/run_shell_agent.sh \\
        generator.harness.command=null generator.harness.function=mini_swe_agent:solve
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.generators.harness.task import HarnessTask

HERE = Path(__file__).resolve().parent


@cache
def _package() -> Any:
    if folder := os.environ.get("MINI_SWE_AGENT"):
        # Behind this Python's own packages, which are what the trainer was tested with.
        sys.path += [str(path) for path in Path(folder).glob("lib/python*/site-packages")]
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    import minisweagent.environments.local as environments
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    class SandboxEnvironment(environments.LocalEnvironment):
        """Environment of the package that runs commands in the task's sandbox."""

        def __init__(self, task: HarnessTask):
            super().__init__()
            self._sandbox = task.sandbox

        def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
            result = self._sandbox.exec(["sh", "-c", action["command"]])
            output = {"output": result.stdout + result.stderr, "returncode": result.returncode, "exception_info": ""}
            self._check_finished(output)
            return output

    return DefaultAgent, LitellmTextbasedModel, SandboxEnvironment


def solve(task: HarnessTask) -> str:
    """Run the agent. Returns: how it ended."""
    agent_class, model_class, environment_class = _package()
    config = yaml.safe_load((HERE / "mini_swe_agent.yaml").read_text())
    model = {name: value for name, value in config["model"].items() if name != "model_class"}
    access = {"api_base": task.base_url, "api_key": task.api_key}
    agent = {
        name: config["agent"][name] for name in ("system_template", "instance_template", "step_limit", "cost_limit")
    }
    settings = model | {"model_name": f"openai/{task.model}", "model_kwargs": access}
    return str(agent_class(model_class(**settings), environment_class(task), **agent).run(task.text)["exit_status"])
