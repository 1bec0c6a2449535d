"""The quickstart: a model that has never seen a sum learns to add, on two cores, and shows its learning curve.

    python examples/quickstart/run.py [--task arithmetic|calculator] [--seed 0] [--launcher inline|ray]
                                      [--output FOLDER] [key=value ...]

Makes a tiny model and its tokenizer, warms it up on demonstrations that mix right and wrong ways, and trains it with
GRPO by `run_<task>.sh`, an ordinary training script. Further arguments are passed to that script. Trainer, policy and
engine are one process with `--launcher inline`, which is faster for such a small model, and four with `--launcher ray`,
as in larger runs: the trainer, two ranks of the policy, the engine.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from skyrl_inspect.dashboard.terminal import block_curve
from skyrl_train.utils.learning_curve import TRAINING_REWARD, curves, save_learning_curve_png
from skyrl_train.utils.run_folder import RunFolder

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

LAUNCHERS = {
    "inline": ["trainer.placement.launcher=inline", "trainer.placement.policy_num_gpus_per_node=1"],
    "ray": [],
}
"""Settings of each launcher on top of the scripts', which are made for Ray."""
OTHER_SETTING = ["--output", "runs/quickstart-2", "trainer.algorithm.grpo_norm_by_std=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["arithmetic", "calculator"], default="arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", choices=["inline", "ray"], default="inline")
    parser.add_argument("--output", type=Path, help="where everything goes; default: runs/quickstart-TASK-SEED")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for the trainer")
    options = parser.parse_args()
    folder = (options.output or REPOSITORY / "runs" / f"quickstart-{options.task}-{options.seed}").resolve()
    started = time.perf_counter()
    prepare(folder, options.task, options.seed)
    train(folder, options.task, options.seed, [*LAUNCHERS[options.launcher], *options.overrides])
    show(folder / "run", time.perf_counter() - started)


def prepare(folder: Path, task: str, seed: int) -> None:
    """Model, warm-up and prompts. A folder that has them already keeps them."""
    common = ["--task", task, "--seed", str(seed)]
    if not (folder / "model" / "config.json").exists():
        python("model.py", "--output", folder / "untrained", *common)
        python("warm_up.py", "--model", folder / "untrained", "--output", folder / "model", *common)
    if not (folder / "data" / "validation.parquet").exists():
        python("data.py", "--output", folder / "data", *common)


def train(folder: Path, task: str, seed: int, overrides: list[str]) -> None:
    """Train with GRPO in one or several separate processes. A stopped run is resumed."""
    environment, command = script_command(folder, task, [f"trainer.seed={seed}", *overrides])
    say(f"{' '.join(f'{name}={value}' for name, value in environment.items())} {' '.join(command[:2])}")
    subprocess.run(command, check=True, env=os.environ | environment)


def script_command(folder: Path, task: str, overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the command line of the task's script."""
    variables = {"MODEL": folder / "model", "DATA_DIR": folder / "data", "RUN_DIR": folder / "run"}
    environment = {"PYTHON": sys.executable} | {name: str(path) for name, path in variables.items()}
    return environment, ["bash", str(HERE / f"run_{task}.sh"), *overrides]


def script_settings(folder: Path, task: str, overrides: list[str]) -> list[str]:
    """Return the settings of the task's script (`key=value` each), for a run in this process."""
    environment, command = script_command(folder, task, overrides)
    # `printf` in the place of Python: the script's own settings, without a second copy of them.
    with tempfile.TemporaryDirectory() as place:
        printer = Path(place) / "print_arguments"
        printer.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        printer.chmod(0o700)
        printing = os.environ | environment | {"PYTHON": str(printer)}
        printed = subprocess.run(command, check=True, env=printing, capture_output=True, text=True).stdout
    return printed.split("\0")[2:-1]  # without `-m module`


def show(run: Path, seconds: float) -> None:
    """Show the curve, and some problems before and after."""
    curve = save_learning_curve_png(run, run / "learning_curve.png")
    scores = {
        row["step"]: row["eval/all/avg_score"]
        for row in RunFolder(run).read_metrics()
        if row.get("eval/all/avg_score") is not None
    }
    first, last = min(scores), max(scores)
    for problem, before, after in changed_answers(run, first, last):
        say(f"{problem}\n    before: {before}\n    after:  {after}")
    if sys.stdout.isatty():
        say("\n".join(draw_curve(run)))
    say(f"mean evaluation reward {scores[first]:.3f} -> {scores[last]:.3f}, in {seconds:.0f} s")
    say(f"curve: {curve}")
    say("Try next:")
    for purpose, command in next_commands(run):
        say(f"    {shlex.join(command)}    # {purpose}")


def draw_curve(run: Path, num_rows: int = 8) -> list[str]:
    """Return the mean reward in training over the steps, as lines of text."""
    steps, rewards = curves(RunFolder(run).read_metrics())[TRAINING_REWARD]
    values = [reward for reward in rewards if reward is not None]
    lines = block_curve(values, 80, num_rows)
    labels = [f"{max(values):.2f}", *[""] * (num_rows - 2), f"{min(values):.2f}"]
    chart = [f"{label:>6} ┤{line}" for label, line in zip(labels, lines, strict=True)]
    return ["mean reward in training", *chart, f"{'step':>6} {steps[0]} to {steps[-1]}"]


def next_commands(run: Path) -> list[tuple[str, list[str]]]:
    """Return what to try after the quickstart, as purpose and command line."""
    python = os.path.relpath(sys.executable)
    script = os.path.relpath(HERE / "run.py")
    return [
        ("every step, sample and token of this run", [python, "-m", "skyrl_train.dashboard", os.path.relpath(run)]),
        ("two turns with a tool", [python, script, "--task", "calculator"]),
        ("advantages without a division by the standard deviation", [python, script, *OTHER_SETTING]),
    ]


def changed_answers(run: Path, first: int, last: int, at_most: int = 3) -> list[tuple[str, str, str]]:
    """Evaluation problems that are solved at step `last` and were not at `first`, with both answers."""

    def rows(step: int) -> list[dict[str, object]]:
        folder = run / "exports" / "dumped_evals" / f"global_step_{step}_evals"
        files = [file for file in folder.glob("*.jsonl") if file.name != "aggregated_results.jsonl"]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    solved = [
        (before, after)
        for before, after in zip(rows(first), rows(last), strict=True)
        if after["score"] != before["score"]
    ]
    return [
        (str(before["input_prompt"]), str(before["output_response"]), str(after["output_response"]))
        for before, after in solved[:at_most]
    ]


def python(script: str, *arguments: object) -> None:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    say(" ".join(["python", script, *map(str, arguments)]))
    subprocess.run(command, check=True)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
