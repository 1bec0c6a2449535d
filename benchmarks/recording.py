"""CPU seconds that the records of a run cost, a step with them beside a step without, in one run.

    python benchmarks/recording.py --steps 40

The step is that of `benchmarks/grpo_step.py` in one process: 64 answers of 64 tokens by a model of 3.3 million
parameters. Every second step writes trajectories, token columns, fingerprints and the time line
(`trainer.dump_trajectories`), the others do not; the order within a pair changes. Besides, the seconds that the
recording functions themselves take are counted: steps vary by a few percent, which hides a difference of less than one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import grpo_step

import skyrl_gym
from skyrl_train import trainer as trainer_module
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.run_folder import RunFolder

RECORDING = (
    (trainer_module, "trajectory_rows"),
    (trainer_module, "describe_batch"),
    (RunFolder, "write_trajectories"),
    (RunFolder, "write_token_columns"),
    (RunFolder, "append_fingerprints"),
    (RunFolder, "append_timeline"),
)
"""Functions that record; the metrics, which every run writes, are none of them."""


class PairedTrainer(RayPPOTrainer):
    """Trainer that records in one step of each pair."""

    seconds: dict[bool, list[float]]

    def batches(self) -> Iterator[Any]:
        for number, prompts in enumerate(super().batches()):
            pair, second = divmod(number, 2)
            is_on = (second == 1) == (pair % 2 == 1)
            self.cfg.trainer.dump_trajectories = is_on
            began = time.process_time()
            yield prompts
            self.seconds[is_on].append(time.process_time() - began)


class PairedExperiment(BasePPOExp):
    """Experiment of the paired trainer."""

    seconds: dict[bool, list[float]]

    def get_trainer(self, **arguments: Any) -> RayPPOTrainer:
        trainer = PairedTrainer(**arguments)
        trainer.seconds = self.seconds = defaultdict(list)
        return trainer


def counted(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Replace a function by one that adds its CPU seconds to `spent`."""
    function: Callable[..., Any] = getattr(owner, name)

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.process_time() - began

    setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps, half of them with records")
    parser.add_argument("--warmup", type=int, default=4, help="further steps before, which do not count")
    options = parser.parse_args()
    configure_logging()
    spent: dict[str, float] = defaultdict(float)
    for owner, name in RECORDING:
        counted(owner, name, spent)
    skyrl_gym.register(id="varied_words", entry_point=grpo_step.VariedWords)
    with tempfile.TemporaryDirectory() as folder:
        work = grpo_step.Work()
        grpo_step.make_model(Path(folder) / "model", work)
        num_steps = options.warmup + options.steps
        rows = grpo_step.make_prompts(work.prompts * num_steps, work.prompt_tokens)
        (Path(folder) / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes = argparse.Namespace(steps=options.steps, warmup=options.warmup, ranks=1, engines=1, micro_batch=16)
        cfg = grpo_step.our_settings(sizes, work, "float32", Path(folder))
        cfg.trainer.placement.launcher = "inline"
        experiment = PairedExperiment(cfg)
        experiment.run()
    on, off = (experiment.seconds[is_on][options.warmup // 2 :] for is_on in (True, False))
    differences = [one - other for one, other in zip(on, off, strict=True)]
    step, difference = statistics.median(off), statistics.median(differences)
    # Of a median: 1.25 times that of a mean, with a spread that single late steps do not widen.
    lower, _, upper = statistics.quantiles(differences, n=4)
    error = 1.25 * (upper - lower) / 1.35 / len(differences) ** 0.5
    print(f"a step without records: {step:.3f} CPU seconds (median of {len(off)})")
    print(f"a step with them: {1000 * difference:+.1f} ms ({difference / step:+.2%} +- {error / step:.2%}, of pairs)")
    own = {name: seconds / len(experiment.seconds[True]) for name, seconds in spent.items()}
    print(f"recording functions: {1000 * sum(own.values()):.1f} ms a step ({sum(own.values()) / step:.2%})")
    for name, seconds in sorted(own.items(), key=lambda item: -item[1]):
        print(f"    {name}: {1000 * seconds:.2f} ms")
    sys.exit(sum(own.values()) > 0.01 * step)


if __name__ == "__main__":
    main()
