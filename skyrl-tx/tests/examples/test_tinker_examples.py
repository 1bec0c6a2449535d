"""Claims of examples/tinker/README.md: each example learns, with the real SDK against a real server."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import mean

import pytest
from tx_server import ServerProcess

EXAMPLES = Path(__file__).parents[3] / "examples" / "tinker"
RUN_SECONDS = 300
BORROWED_TORCH = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.path.append({sysconfig.get_paths()["purelib"]!r})  # last: torch comes from here, and only what is missing there
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""

# The model that the examples begin with takes a minute to teach; the conformance suite runs the same client.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture
def run(server: ServerProcess, sdk_python: Path):
    """An example and its options -> what it printed."""

    def run(name: str, *options: str, borrow_torch: bool = False) -> str:
        prefix = ["-c", BORROWED_TORCH] if borrow_torch else []
        command = [sdk_python, *prefix, EXAMPLES / name, "--base-url", server.url, *options]
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr + server.tail()
        return done.stdout

    return run


def curve(printed: str, name: str) -> list[float]:
    """The numbers that stand after a name, one a step."""
    return [float(number) for number in re.findall(rf"^step .*{name}\s+(-?[\d.]+)", printed, re.MULTILINE)]


def test_supervised_training_resumes_from_saved_state(run):
    printed = run("sft.py", "--steps", "16")
    loss = curve(printed, "loss")
    assert "a new client goes on from tinker://" in printed
    assert loss[8] < loss[7] + 0.5, "weights or optimizer were lost on the way"
    assert loss[-1] < 0.5 * loss[0]
    assert "weights: tinker://" in printed


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_reinforcement_learning_raises_reward(run, loss):
    rewards = curve(run("rl.py", "--steps", "12", "--loss", loss), "reward")
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.15


def test_model_learns_to_call_tool(run):
    printed = run("multi_turn_tool_rl.py", "--steps", "8")
    rewards, asked = curve(printed, "reward"), curve(printed, "asked")
    assert asked[-1] > asked[0] + 0.2
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.15


def test_custom_loss_decreases(run):
    if sys.version_info[:2] != (3, 11):
        pytest.skip("torch is borrowed from this environment, whose Python must be the SDK environment's, 3.11")
    printed = run("dpo.py", "--steps", "6", borrow_torch=True)
    loss = curve(printed, "loss")
    assert loss[0] == pytest.approx(0.6931, abs=1e-3), "at first the model is the reference"
    assert loss[-1] < loss[0] - 0.1
    assert curve(printed, "preferred")[-1] == 1.0


def test_student_approaches_teacher(run):
    divergence = curve(run("distillation.py", "--steps", "10"), "KL to the teacher")
    assert mean(divergence[-3:]) < 0.5 * mean(divergence[:3])
