"""Killed at any point and started again, a run goes on as if nothing had happened, bit for bit.

Real rows (GSM8K through the example's dataset builder), a real model (stories260K), FSDP2, one engine.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[3]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def gsm8k(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    command = [sys.executable, "examples/gsm8k/gsm8k_dataset.py", "--input", str(test_data / "gsm8k")]
    command += ["--output_dir", str(folder), "--max_train_dataset_length", "64"]
    subprocess.run(command, check=True, cwd=REPOSITORY, timeout=120)
    # A tiny model solves nothing, and without rewards nothing is learned: let another environment judge.
    table = pyarrow.parquet.read_table(folder / "train.parquet").drop_columns(["env_class"])
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    return folder


class Run:
    """A training run in a process of its own."""

    def __init__(self, folder: Path, data: Path, model: Path, **changes: object):
        self.folder = folder
        settings = {
            "data.train_data": f"[{data / 'train.parquet'}]",
            "data.val_data": "[]",
            "trainer.policy.model.path": str(model),
            "trainer.run_dir": str(folder),
            "trainer.placement.policy_num_gpus_per_node": 2,
            "trainer.bf16": "false",
            "trainer.flash_attn": "true",
            "trainer.gradient_checkpointing": "false",
            "trainer.train_batch_size": 8,
            "trainer.policy_mini_batch_size": 4,
            "trainer.micro_train_batch_size_per_gpu": 4,
            "trainer.micro_forward_batch_size_per_gpu": 4,
            "trainer.policy.optimizer_config.lr": 1e-3,
            "trainer.algorithm.use_kl_loss": "false",
            "trainer.max_training_steps": NUM_STEPS,
            "trainer.max_prompt_length": 300,
            "trainer.ckpt_interval": 1,
            "trainer.hf_save_interval": NUM_STEPS,
            "generator.model_dtype": "float32",
            "generator.n_samples_per_prompt": 4,
            "generator.sampling_params.max_generate_length": 16,
            "environment.env_class": "length_of_answer",
        }
        settings |= {name.replace("__", "."): value for name, value in changes.items()}
        self._command = [sys.executable, str(Path(__file__).parent / "train_with_length_reward.py")]
        self._command += [f"{name}={value}" for name, value in settings.items()]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "console.log", "ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True
            )

    def finish(self, timeout: float = 240) -> None:
        assert self.process is not None
        try:
            returned = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end:\n{self.log()}")
        assert returned == 0, self.log()

    def kill(self) -> None:
        """SIGKILL to the trainer; Ray's processes end with it."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def kill_when(self, is_time: Callable[[], bool], timeout: float = 240) -> bool:
        """Kills at the moment `is_time` says so; False if the run ended before."""
        assert self.process is not None
        deadline = time.monotonic() + timeout
        while not is_time():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.002)
        self.kill()
        return True

    def log(self) -> str:
        return (self.folder / "console.log").read_text()[-4000:]

    def metrics(self) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {
                k: v
                for k, v in row.items()
                if k != "time" and not k.startswith(("timing/", "memory/", "engines/")) and not k.endswith("seconds")
            }
            for row in rows
        ]

    def results(self) -> dict[str, object]:
        """All that must be equal: metrics, trajectories (tokens, log-probs, order of the data) and parameters."""
        trajectories = {path.name: path.read_text() for path in sorted((self.folder / "trajectories").iterdir())}
        model = self.folder / "exports" / f"global_step_{NUM_STEPS}" / "policy" / "model.safetensors"
        weights = {name: tensor.numpy().tobytes() for name, tensor in load_file(model).items()}
        critic = model.parents[1] / "critic" / "model.safetensors"
        if critic.exists():
            weights |= {f"critic.{name}": tensor.numpy().tobytes() for name, tensor in load_file(critic).items()}
        return {"metrics": self.metrics(), "trajectories": trajectories, "weights": weights}


@pytest.fixture(scope="module")
def uninterrupted(gsm8k: Path, test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    run = Run(tmp_path_factory.mktemp("runs") / "uninterrupted", gsm8k, test_data / "tiny_lm" / "stories260K")
    run.start()
    run.finish()
    results = run.results()
    steps = [row["step"] for row in run.metrics()]
    assert steps == [1, 2, 3]
    assert all(row["policy/grad_norm"] > 0 for row in run.metrics()), "nothing is learned, so nothing is shown"
    assert all(row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4 for row in run.metrics())
    return results


def assert_same(run: Run, expected: dict[str, object]) -> None:
    for name, value in run.results().items():
        assert value == expected[name], f"{name} differ"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ppo_run_resumes_bitwise(gsm8k, test_data, tmp_path):
    """The run has a critic, an adaptive KL coefficient, replaced prompts, and a reference model that has been updated:
    64 prompts (less the long ones) are two steps an epoch, and it is killed in the third step."""
    model = test_data / "tiny_lm" / "stories260K"
    changes = {
        "trainer__placement__launcher": "inline",  # under Ray, with two ranks: the tests marked full
        "trainer__placement__policy_num_gpus_per_node": 1,
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__algorithm__use_kl_in_reward": "true",
        "trainer__algorithm__kl_ctrl__type": "adaptive",
        "trainer__algorithm__dynamic_sampling__type": "replace",
        "trainer__critic__model__path": str(model),
        "trainer__critic__optimizer_config__lr": 1e-3,
        "trainer__train_batch_size": 24,
        "trainer__policy_mini_batch_size": 12,
        "trainer__critic_mini_batch_size": 24,
        "trainer__max_tokens_per_microbatch": 2048,
        "trainer__update_ref_every_epoch": "true",
        "trainer__epochs": 2,
        "generator__n_samples_per_prompt": 2,
    }
    whole = Run(tmp_path / "whole", gsm8k, model, **changes)
    run = Run(tmp_path / "run", gsm8k, model, **changes)
    whole.start()
    run.start()
    assert run.kill_when((run.folder / "ckpts" / "global_step_2").exists)
    assert (run.folder / "ckpts" / "global_step_2" / "ref").exists()
    assert not (run.folder / "ckpts" / "global_step_3").exists()
    run.start()
    whole.finish()
    assert [row["step"] for row in whole.metrics()] == [1, 2, 3]
    assert all(row["critic/grad_norm"] > 0 and row["policy/grad_norm"] > 0 for row in whole.metrics())
    run.finish()
    assert_same(run, whole.results())


def some_seconds_in(random_generator: random.Random) -> Callable[[], bool]:
    """A moment of starting, or of the first steps."""
    moment = time.monotonic() + random_generator.uniform(5, 30)
    return lambda: time.monotonic() > moment


def while_a_checkpoint_is_written(run: Run, random_generator: random.Random) -> Callable[[], bool]:
    """A moment between the first file of a checkpoint and the steps after it."""
    delay, seen = random_generator.uniform(0, 0.4), []

    def is_time() -> bool:
        if not seen and list((run.folder / "ckpts").glob("*.partial")):
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() > seen[0] + delay

    return is_time


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_random_kills_leave_run_bitwise_equal(uninterrupted, gsm8k, test_data, tmp_path):
    random_generator = random.Random(0)
    num_kills = 0
    for attempt in range(10):
        run = Run(tmp_path / f"run{attempt}", gsm8k, test_data / "tiny_lm" / "stories260K")
        while num_kills < 10:
            run.start()
            in_a_checkpoint = random_generator.random() < 0.6
            is_time = (
                while_a_checkpoint_is_written(run, random_generator)
                if in_a_checkpoint
                else some_seconds_in(random_generator)
            )
            if not run.kill_when(is_time):
                break  # it came to its end before
            num_kills += 1
        else:
            run.start()
        run.finish()
        assert_same(run, uninterrupted)
        if num_kills == 10:
            return
    pytest.fail(f"only {num_kills} kills in 10 runs")
