"""An agent trained through skyrl-train's `main_base`, with one setting; the same task file on a server, unchanged."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import drawers
import pytest
import yaml

from skyrl_agent import AutoAgentRunner
from skyrl_agent.records import read_records
from skyrl_train.utils.run_folder import RunFolder

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

pytestmark = pytest.mark.slow  # what all look at is a run of half a minute
STEPS = 12
WARM = {"sampling_params": {"temperature": 1.0}}
TASK = drawers.task(**WARM, val_config={"num_trajectories": 1} | WARM)


class Run:
    """`python -m skyrl_train.entrypoints.main_base` in a folder of its own."""

    def __init__(self, folder: Path, **task: Any) -> None:
        self.folder, self.model, self.data = folder, folder / "model", folder / "rows.jsonl"
        self.task_file, self.trajectories = folder / "drawers.yaml", folder / "trajectories.jsonl"
        self.task_file.write_text(yaml.safe_dump(TASK | {"output": {"trajectories": str(self.trajectories)}} | task))
        self.data.write_text("".join(json.dumps(row) + "\n" for row in drawers.rows()))

    def start(self, launcher: str, *settings: str) -> None:
        command = [
            *(sys.executable, "-m", "skyrl_train.entrypoints.main_base", f"generator.task={self.task_file}"),
            *("generator.n_samples_per_prompt=16", "generator.model_dtype=float32", "environment.env_class=null"),
            *(f"data.train_data=[{self.data}]", f"data.val_data=[{self.data}]"),
            *(f"trainer.policy.model.path={self.model}", f"trainer.run_dir={self.folder / 'run'}"),
            *("trainer.placement.device=cpu", "trainer.bf16=false", "trainer.gradient_checkpointing=false"),
            *("trainer.train_batch_size=9", "trainer.policy_mini_batch_size=9", "trainer.max_prompt_length=64"),
            *("trainer.micro_train_batch_size_per_gpu=128", "trainer.micro_forward_batch_size_per_gpu=128"),
            *("trainer.epochs=100", f"trainer.max_training_steps={STEPS}", f"trainer.hf_save_interval={STEPS}"),
            *(f"trainer.export_path={self.folder / 'export'}", "trainer.ckpt_interval=-1", "trainer.logger=console"),
            *("trainer.eval_before_train=true", f"trainer.eval_interval={STEPS}"),
            *(f"trainer.policy.optimizer_config.{setting}" for setting in ("lr=5e-4", "adam_betas=[0.9,0.95]")),
            *("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.advantage_estimator=rloo"),
            *(f"trainer.placement.launcher={launcher}", *settings),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=self.folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return RunFolder(self.folder / "run").read_metrics()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("run"))
    drawers.save_model_that_knows_calls(run.model)
    run.start("inline")
    return run


@pytest.mark.full
def test_ray_run_gives_same_rewards(trained: Run, tmp_path: Path):
    run = Run(tmp_path)
    run.model = trained.model
    run.start("ray", "trainer.max_training_steps=2", "trainer.eval_before_train=false")
    name = "reward/avg_raw_reward"
    rewards, expected = ([step[name] for step in each.metrics if name in step] for each in (run, trained))
    assert len(rewards) == 2 and rewards == expected[:2]


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_agent_trains_with_vllm_on_gpu(tmp_path: Path):
    run = Run(tmp_path)
    drawers.save_model_that_knows_calls(run.model)
    run.start(
        *("ray", "trainer.placement.device=cuda", "generator.backend=vllm", "generator.enforce_eager=true"),
        *("generator.gpu_memory_utilization=0.2", "trainer.max_training_steps=2", "trainer.eval_before_train=false"),
    )
    for step in run.metrics[:2]:
        assert step["rollout_metrics/finish_tool_ratio"] > 0.5
        assert step["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-2


def test_agent_learns_to_use_tool(trained: Run):
    rewards = [step["reward/avg_raw_reward"] for step in trained.metrics if "reward/avg_raw_reward" in step]
    print(rewards)
    assert len(rewards) == STEPS
    assert rewards[0] < 0.4, "it should not know the task yet"
    assert fmean(rewards[-3:]) > 0.6
    assert trained.metrics[-1]["rollout_metrics/finish_tool_ratio"] > 0.8


def test_trajectory_file_has_log_probs_and_tool_calls(trained: Run):
    records = list(read_records(trained.trajectories))
    of_training = [record for record in records if not record["val"]]
    assert len(of_training) == STEPS * 9 * 16
    # Not every trajectory ends by a call of finish, and the last one to end is any of them.
    last = [record for record in of_training if [c["name"] for c in record["tool_calls"]] == ["look", "finish"]][-1]
    [row] = last["rows"]
    said = [drawers.call(c["name"], **c["arguments"]) for c in last["tool_calls"]]
    assert [text for written, text in row["spans"] if written] == said
    assert all(value < 0 for value, written in zip(row["log_probs"], row["mask"], strict=True) if written)


async def test_same_task_file_runs_on_server(trained: Run):
    from skyrl_train.endpoint.server import EndpointServer
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
    from skyrl_train.inference_engines.native.loading import load_tokenizer

    [folder] = (trained.folder / "export").glob("**/config.json")
    tokenizer: Any = load_tokenizer(str(folder.parent), trust_remote_code=False)
    engine = NativeInferenceEngine(str(folder.parent), dtype="float32")
    server = EndpointServer(engine, tokenizer, "drawers")
    await server.start()
    try:
        runner = AutoAgentRunner.from_task(
            trained.task_file,
            None,
            tokenizer,
            infer_backend="openai_server",
            backend_config={"model_name": "drawers", "api_url": server.url},
        )
        output = await runner.run(drawers.rows() * 16, val_mode=True)
    finally:
        await server.stop()
        await engine.teardown()
    assert fmean(output["traj_rewards"]) > 0.6
    assert output["rollout_logprobs"] is not None


@pytest.mark.full
def test_agent_trains_asynchronously(trained: Run, tmp_path: Path):
    """Every trajectory once an epoch, on tokens of the last two weight versions."""
    run = Run(tmp_path)
    run.model = trained.model
    run.start(
        "inline",
        *("trainer.train_batch_size=3", "trainer.policy_mini_batch_size=3", "generator.n_samples_per_prompt=4"),
        *("trainer.max_training_steps=3", "trainer.eval_before_train=false", "trainer.hf_save_interval=-1"),
        *("trainer.placement.colocate_all=false", "trainer.fully_async.enabled=true"),
        *("trainer.fully_async.max_staleness_steps=1", "trainer.fully_async.order=exact"),
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
    )
    records = [record for record in read_records(run.trajectories) if not record["val"]]
    assert len(records) == 9 * 4 and all(len(record["tool_calls"]) in (0, 1, 2) for record in records)
    assert [row["async/staleness_max"] for row in run.metrics if "async/staleness_max" in row] == [0, 1, 1]
    assert all(row["async/num_failed_groups"] == 0 for row in run.metrics if "async/num_failed_groups" in row)
    of_steps = [row for row in run.metrics if "async/staleness_max" in row]
    assert all(row["dispatcher/generate/seconds_mean"] > 0 for row in of_steps)
    steps = [RunFolder(tmp_path / "run").read_trajectories(step, "train") for step in (1, 2, 3)]
    samples = [(row["uid"], row["sample"]) for rows in steps for row in rows]
    assert len(samples) == len(set(samples)) == 9 * 4
    for number, rows in enumerate(steps):
        versions = {version for row in rows for version in row["tokens"]["weight_versions"] if version >= 0}
        assert versions <= {number - 1, number}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"generator": {"max_turns": 3}}, "generator.max_turns=3"),
        ({"trainer": {"algorithm": {"advantage_estimator": "reinforce++"}}}, "advantage_estimator=reinforce"),
        ({"generator": {"task": "no_such_file.yaml"}}, "No such file or directory: 'no_such_file.yaml'"),
        ({"generator": {"eval_n_samples_per_prompt": 2, "eval_sampling_params": {"temperature": 1.0}}}, "is 1"),
        ({"generator": {"sampling_params": {"temperature": 0.5}}}, "must be what the task file"),
        ({"data": {"val_data": ["{bad_rows}"]}}, "data.val_data does not fit generator.task"),
    ],
    ids=["turns", "estimator", "file", "samples", "temperature", "row"],
)
def test_invalid_settings_are_rejected_before_start(trained: Run, changes: dict[str, Any], text: str):
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.entrypoints.main_base import BasePPOExp
    from skyrl_train.errors import ConfigError

    bad_rows = trained.folder / "bad_rows.jsonl"
    bad_rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}]}))
    settings: dict[str, Any] = {
        "data": {"train_data": [str(trained.data)], "val_data": []},
        "trainer": {
            "policy": {"model": {"path": str(trained.model)}},
            "placement": {"device": "cpu"},
            "train_batch_size": 9,
            "policy_mini_batch_size": 9,
            "max_prompt_length": 64,
            "run_dir": str(trained.folder / "refused"),
        },
        "generator": {"task": str(trained.task_file), "n_samples_per_prompt": 8},
    }
    for section, values in changes.items():
        settings[section] = settings[section] | values
    if "data" in changes:
        settings["data"] |= {"val_data": [str(bad_rows)]}
        settings["trainer"] |= {"eval_interval": 1}
    with pytest.raises(ConfigError) as error:
        BasePPOExp(SkyRLConfig.from_dict(settings))
    assert text in str(error.value)
