"""Cost of an episode of each shipped environment, played with its perfect answers.

    python benchmarks/environments.py [--episodes 20] [--threads 32] [ID ...]

One thread first (the median time of an episode, from `make` to `close`), then many threads at once, as the trainer
drives them. The examples of an environment take turns; what it needs (a retrieval
server, a judge) runs in this process.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import skyrl_gym
from skyrl_gym.check import examples_of
from skyrl_gym.check.services import services_for
from skyrl_gym.envs.base_text_env import Example
from skyrl_gym.episode import EpisodeResult, run_episode

Play = Callable[[int], EpisodeResult]


def player(env_id: str, examples: Sequence[Example], services: dict) -> Play:
    """Make a function that plays the n-th episode."""

    def play(number: int) -> EpisodeResult:
        example = examples[number % len(examples)]
        oracle = iter(example.oracle)
        env = skyrl_gym.make(env_id, env_config=dict(example.env_config) | services, extras=dict(example.extras))
        return run_episode(env, example.prompt, lambda _: next(oracle), seed=0)

    return play


def row(env_id: str, episodes: int, threads: int) -> str:
    """Make one line of the Markdown table."""
    examples = examples_of(skyrl_gym.spec(env_id))
    with services_for(env_id) as services:
        play = player(env_id, examples, services)
        play(0)  # imports, first connections, worker processes
        alone = [play(number) for number in range(episodes)]
        assert all(result.outcome_reward > 0 for result in alone), env_id
        started, cpu_started = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(threads) as pool:
            together = list(pool.map(play, range(episodes * 4)))
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        assert all(result.outcome_reward > 0 for result in together), env_id
    turns = statistics.mean(len(result.rewards) for result in alone)
    milliseconds = 1000 * statistics.median(result.wall_seconds for result in alone)
    per_second = len(together) / seconds
    return (
        f"| `{env_id}` | {turns:.1f} | {milliseconds:.2f} | {per_second:.0f} "
        f"| {1000 * cpu_seconds / len(together):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What an episode of each shipped environment costs.")
    parser.add_argument("ids", nargs="*", metavar="ID", default=sorted(skyrl_gym.registry))
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--threads", type=int, default=32)
    arguments = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"skyrl-gym {version('skyrl-gym')}, load {os.getloadavg()[0]:.1f}\n"
    )
    print(f"| environment | turns | ms an episode, alone | episodes/s, {arguments.threads} threads | CPU ms of ours |")
    print("|---|---|---|---|---|")
    for env_id in arguments.ids:
        print(row(env_id, arguments.episodes, arguments.threads), flush=True)


if __name__ == "__main__":
    main()
