"""GRPO of an agent with the real `tinker` SDK, in an environment of its own, against our server."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import drawers
import pytest
import yaml
from sdk_environment import sdk_environment
from tx_server import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[3]
SDK_VERSION = "0.38.0"
BORROWED = f"""
import runpy, sys
sys.path[:0] = {[str(REPOSITORY / "skyrl-agent"), str(REPOSITORY / "skyrl-gym"), str(Path(__file__).parent)]!r}
sys.path.append({sysconfig.get_paths()["purelib"]!r})  # last: only what the SDK's environment lacks
"""
TRAIN = 'runpy.run_module("skyrl_agent.integrations.tinker.tinker_train", run_name="__main__", alter_sys=True)'
CONFORM = """
import asyncio, tinker
from transformers import AutoTokenizer
from skyrl_agent.integrations.base import build_backend
from skyrl_agent.testing.backend_conformance import CHECKS, Subject, run_check

url, model = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
client = tinker.ServiceClient(base_url=url).create_sampling_client(base_model="tiny")
client = client.result() if hasattr(client, "result") else client
subject = Subject(
    build_backend("tinker", infer_engine=client, tokenizer=tokenizer),
    tokenizer,
    tokenizer.encode("<start>user:what is 3 and 4?<end><start>assistant:"),
)
for check in CHECKS:
    print(check.__name__, asyncio.run(run_check(check, subject)), flush=True)
"""
TASK = drawers.task(num_trajectories=16, val_config={"num_trajectories": 2})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tinker")
    drawers.save_model_that_knows_calls(folder / "model")
    with ServerProcess(folder, "--base-model", str(folder / "model"), "--served-model-name", "tiny") as running:
        yield running


def run_with_sdk(program: str, arguments: list[str], folder: Path, server: ServerProcess) -> str:
    """Run a program in an environment with the SDK, plus this environment's packages that it lacks. Returns: its
    output.
    """
    command = [sdk_environment(SDK_VERSION), "-c", BORROWED + program, *arguments]
    environment = os.environ | {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:] + server.tail()
    return done.stdout


@pytest.fixture
def train(server: ServerProcess, tmp_path: Path) -> Any:
    """`train(key="value")` -> what it printed."""
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(TASK))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawers.rows()))
    usual = {
        "skyrl_agent_task_yaml": "task.yaml",
        "dataset_file": "rows.jsonl",
        "model_name": "tiny",
        "base_url": server.url,
        "batch_size": 9,
        "learning_rate": 3e-3,
        "save_every": 0,
    }

    def run(**changes: Any) -> str:
        settings = [f"{key}={value}" for key, value in (usual | changes).items()]
        return run_with_sdk(TRAIN, settings, tmp_path, server)

    return run


def test_agent_learns_and_resumes_from_checkpoint(train: Any, tmp_path: Path):
    train(max_steps=8, save_every=8, eval_dataset_file="rows.jsonl", eval_every=8)
    train(max_steps=10, resume_exp_name="skyrl-agent", wandb_name="resumed")
    first, second = (_metrics(tmp_path / "tinker_output" / name) for name in ("skyrl-agent", "resumed"))
    rewards = [row["rollout_metrics/raw_reward"] for row in first]
    print(rewards, [row["rollout_metrics/raw_reward"] for row in second])
    assert "eval/reward/mean/default" in first[0]
    assert rewards[0] < 0.4
    assert fmean(rewards[-2:]) > rewards[0] + 0.1
    assert [row["step"] for row in second] == [8, 9]
    assert second[0]["rollout_metrics/raw_reward"] > rewards[0] + 0.1


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tinker_backend_conforms(server: ServerProcess, tmp_path: Path):
    printed = run_with_sdk(CONFORM, [server.url, str(server.folder / "model")], tmp_path, server)
    outcomes = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert outcomes.pop("a_dead_server_is_an_infrastructure_failure") == "not asked"
    assert len(outcomes) >= 9 and set(outcomes.values()) == {"None"}
