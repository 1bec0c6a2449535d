"""A run that is told to stop stops, and takes every process it started with it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MARK = "SKYRL_TEST_RUN"


def processes_of(mark: str) -> dict[int, str]:
    """The processes that inherited the mark, wherever in the tree they are: id and command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is somebody else's
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize(
    "number, launcher",
    [
        (signal.SIGTERM, "ray"),
        pytest.param(signal.SIGINT, "inline", marks=pytest.mark.full),
        pytest.param(signal.SIGINT, "ray", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, "inline", marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_interrupted_run_leaves_no_process(chat_model: str, tmp_path: Path, number: signal.Signals, launcher: str):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "2*3="}], "reward_spec": {"ground_truth": "6"}}
    rows.write_text((json.dumps(row) + "\n") * 4)
    settings = {
        "trainer.policy.model.path": chat_model,
        "data.train_data": f"[{rows}]",
        "data.val_data": "[]",
        "trainer.run_dir": tmp_path / "run",
        "trainer.placement.launcher": launcher,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.max_prompt_length": 40,
        "trainer.epochs": 100_000,
        "trainer.ckpt_interval": 100_000,
        "trainer.update_epochs_per_batch": 5,
        "trainer.algorithm.use_kl_loss": "false",
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.max_generate_length": 8,
        "environment.env_class": "multiply",
    }
    mark = uuid.uuid4().hex
    with open(tmp_path / "console.log", "wb") as console:
        run = subprocess.Popen(
            [sys.executable, "-m", "skyrl_train.entrypoints.main_base", *(f"{k}={v}" for k, v in settings.items())],
            stdout=console,
            stderr=console,
            env={**os.environ, MARK: mark},
            start_new_session=True,
            # A shell that starts these tests in the background has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "console.log").read_text()[-3000:]
            time.sleep(0.1)
        if launcher == "ray":
            assert len(processes_of(mark)) >= 4, "the trainer, Ray's services, a policy worker, an engine"
        else:
            assert not [command for command in processes_of(mark).values() if "raylet" in command or "ray::" in command]
        began = time.monotonic()
        os.kill(run.pid, number)
        code = run.wait(timeout=30)
        while left := processes_of(mark):
            assert time.monotonic() < began + 40, left
            time.sleep(0.2)
    finally:
        for pid in processes_of(mark):
            os.kill(pid, signal.SIGKILL)
        run.wait(timeout=30)
    assert code == 130
    said = (tmp_path / "console.log").read_text()
    assert "stop requested; the same command resumes from the newest checkpoint" in said
    assert "Traceback" not in said, said
    num_checkpoints = len(list((tmp_path / "run" / "ckpts").glob("global_step_*")))
    assert num_checkpoints == (1 if number is signal.SIGTERM else 0), "the interval has not come yet"
