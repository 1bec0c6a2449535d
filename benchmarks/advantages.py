"""Time of each advantage estimator on a large batch, on one thread.

    python benchmarks/advantages.py [--rows 2048] [--tokens 1024] [--repetitions 31]

The batch is made here: groups of 8 samples, answers of 1 to `--tokens` tokens (padded to that), each of several turns
with the environment's tokens between them, and rewards on the last token, or on every token (as with the KL divergence
in the reward). Prints medians and the fastest and slowest repetition, of the thread's own CPU time (what a busy machine
changes least) and of wall time. The estimators take turns, so that a disturbance of the machine meets all of them.
"""

import argparse
import os
import platform
import time
from importlib.metadata import version
from typing import Any

import torch

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry, normalize_advantages, turn_numbers
from skyrl_train.config.algorithm import AlgorithmConfig

GROUP = 8
LONGEST_TURN = 200
TARGET_MS = 20.0


def make_batch(num_rows: int, num_tokens: int, seed: int = 0) -> dict[str, Any]:
    """Make the batch that the trainer passes to an estimator: B = `num_rows`, T = `num_tokens`."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=generator)

    columns = torch.arange(num_tokens)
    lengths = integers(1, num_tokens, num_rows, 1)
    response_mask = columns < lengths
    # Turns of model and environment alternate; the environment's are a quarter as long.
    num_borders = 2 * num_tokens // LONGEST_TURN + 2
    spans = integers(1, LONGEST_TURN, num_rows, num_borders)
    spans[:, 1::2] = spans[:, 1::2] // 4 + 1
    spoken = torch.searchsorted(spans.cumsum(dim=1), columns.expand(num_rows, -1).contiguous(), right=True)
    action_mask = response_mask & (spoken % 2 == 0)
    rewards = torch.zeros(num_rows, num_tokens)
    rewards.scatter_(1, lengths - 1, torch.rand(num_rows, 1, generator=generator).round())
    return {
        "token_level_rewards": rewards,
        "response_mask": response_mask.long(),
        "action_mask": action_mask.long(),
        "index": [str(row // GROUP) for row in range(num_rows)],
        "turns": turn_numbers(action_mask.long()),
        "values": torch.rand(num_rows, num_tokens, generator=generator),
        "config": AlgorithmConfig(),
        "grpo_norm_by_std": True,
        "gamma": 0.99,
        "lambd": 0.95,
    }


def measure(batch: dict[str, Any], repetitions: int) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of every repetition, of CPU and of wall time, each sorted, by what was computed."""
    dense = batch | {"token_level_rewards": batch["token_level_rewards"] + 0.01 * batch["values"]}
    tasks: dict[str, Any] = {}
    for name in AdvantageEstimatorRegistry.list_available():
        estimator = AdvantageEstimatorRegistry.get(name)
        tasks[f"`{name}`"] = lambda estimator=estimator: estimator(**batch)
        tasks[f"`{name}`, a reward on every token"] = lambda estimator=estimator: estimator(**dense)
    tasks["`turn_numbers`"] = lambda: turn_numbers(batch["action_mask"])
    tasks["`normalize_advantages`"] = lambda: normalize_advantages(batch["values"], batch["action_mask"])
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    wall: dict[str, list[float]] = {name: [] for name in tasks}
    for repetition in range(repetitions + 2):
        for name, task in tasks.items():
            cpu_start, wall_start = time.thread_time(), time.perf_counter()
            task()
            if repetition >= 2:  # the first ones fetch memory from the system
                cpu[name].append(1000 * (time.thread_time() - cpu_start))
                wall[name].append(1000 * (time.perf_counter() - wall_start))
    return {name: (sorted(cpu[name]), sorted(wall[name])) for name in tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(options.rows, options.tokens)
    mask, turns = batch["response_mask"], batch["turns"]
    print(
        f"{options.rows} x {options.tokens}, groups of {GROUP}: {int(mask.sum())} tokens of answers, "
        f"{int(batch['action_mask'].sum())} of them the model's, in {turns.amax(dim=1).float().mean() + 1:.1f} turns "
        f"each. Python {platform.python_version()}, torch {version('torch')}, one thread, load "
        f"{os.getloadavg()[0]:.1f}, median of {options.repetitions}.\n"
    )
    print(f"| | CPU ms | min - max | wall ms | CPU under {TARGET_MS:.0f} ms |\n|---|---|---|---|---|")
    for name, (cpu, wall) in measure(batch, options.repetitions).items():
        median, wall_median = (values[len(values) // 2] for values in (cpu, wall))
        verdict = "yes" if median < TARGET_MS else "no"
        print(f"| {name} | {median:.1f} | {cpu[0]:.1f} - {cpu[-1]:.1f} | {wall_median:.1f} | {verdict} |")


if __name__ == "__main__":
    main()
