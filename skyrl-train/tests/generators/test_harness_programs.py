"""Programs of agent frameworks as harnesses, unchanged: each turn's tokens are the drawn ones, in one row where the
framework sends answers back as they were."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.harness import HarnessConfig

from .test_harness import Model, certified, trajectories_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "harness"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call>'
TURNS = [CALL.format("shell", "command", line) for line in ("cat f.py", "sed -i s/2/7/ f.py")]
END, FINAL_CALL = "Done.", CALL.format("final_answer", "answer", "Done.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "packages", "end", "new_rows"),
    [
        ("openai_agents_program", ["agents"], END, {}),
        ("langgraph_program", ["langgraph", "langchain_openai"], END, {}),
        ("smolagents_program", ["smolagents"], FINAL_CALL, {"edited": 2}),  # it writes its calls as texts of its own
    ],
)
async def test_program_with_tool_calls_becomes_token_exact_rows(
    program: str, packages: list[str], end: str, new_rows: dict[str, int], qwen: Any
):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return [*TURNS, end][len(prompts) - 1]

    harness = HarnessConfig(
        command=[sys.executable, str(EXAMPLES / f"{program}.py"), "{task}"],
        sandbox="process",
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        deadline_seconds=120,
    )
    row = {"files": {"f.py": "return a+2"}, "grade": {"command": ["grep", "-qx", "return a+7", "f.py"]}}
    [trajectory], _ = await trajectories_of(Model(qwen("Qwen-Qwen2.5-7B-Instruct"), answer, 4096), harness, [row])
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    certificate = certified(trajectory)
    assert (certificate.exact_share, certificate.num_trained) == (1.0, certificate.num_drawn)
    assert (certificate.new_rows, len(trajectory.samples)) == (new_rows, 1 + sum(new_rows.values()))
    assert len(prompts) == 3 and "\nreturn a+2" in prompts[1]
