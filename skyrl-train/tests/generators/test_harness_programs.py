"""Programs of agent frameworks as harnesses, unchanged: each turn's tokens are the drawn ones, in one row."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.harness import HarnessConfig

from .test_harness import Model, certified, trajectories_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "harness"
CALL = '<tool_call>\n{{"name": "shell", "arguments": {{"command": "{}"}}}}\n</tool_call>'
TURNS = [CALL.format("cat f.py"), CALL.format("sed -i s/2/7/ f.py"), "Done."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "packages"),
    [("openai_agents_program", ["agents"]), ("langgraph_program", ["langgraph", "langchain_openai"])],
)
async def test_a_program_that_calls_a_tool_becomes_one_exact_row(program: str, packages: list[str], qwen: Any):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return TURNS[prompt.count("\n<tool_response>")]

    harness = HarnessConfig(
        command=[sys.executable, str(EXAMPLES / f"{program}.py"), "{task}"],
        sandbox="process",
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        deadline_seconds=120,
    )
    row = {"files": {"f.py": "return a+2"}, "grade": {"command": ["grep", "-qx", "return a+7", "f.py"]}}
    [trajectory], _ = await trajectories_of(Model(qwen("Qwen-Qwen2.5-7B-Instruct"), answer, 4096), harness, [row])
    assert (trajectory.failure, trajectory.reward, len(trajectory.samples)) == (None, 1.0, 1)
    certificate = certified(trajectory)
    assert (certificate.exact_share, certificate.num_trained) == (1.0, certificate.num_drawn)
    assert len(trajectory.turn_lengths) == 3 and "return a+2\n</tool_response>" in prompts[1]
