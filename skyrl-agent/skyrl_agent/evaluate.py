"""`python -m skyrl_agent.evaluate TASKFILE ROWS`: run a task file's agent on rows, with the model of any
OpenAI-compatible server (`generator.backend_config`).

Each trajectory is appended to the output file as it ends. Repeating the command runs missing and failed trajectories
only; other settings or rows are rejected. Ctrl-C and SIGTERM write unfinished trajectories too.
"""

import argparse
import asyncio
import fcntl
import hashlib
import json
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.config.task_file import TaskFile, load_task_file
from skyrl_agent.datasets import read_rows
from skyrl_agent.errors import AgentError, BatchFailedError, ConfigError
from skyrl_agent.finish import CANCELLED
from skyrl_agent.records import last_records, to_result
from skyrl_agent.runner import AgentRunner
from skyrl_agent.training_rows import check_batch, training_rows
from skyrl_agent.types import JsonObject, Row, TrajectoryResult
from skyrl_gym.chat.tokenizer_check import find_tokenizer_fault
from skyrl_gym.waits import recorded_run

FREE = (
    "dispatcher.",
    "output.",
    "runtime.",
    "generator.backend_config.api_",
    "generator.backend_config.timeout_seconds",
    "generator.num_trajectories",
    "generator.val_config.num_trajectories",
    "generator.request_timeout_seconds",
    "generator.debug_log",
)
"""Beginnings of the settings that may change between two starts of one evaluation."""


@dataclass(frozen=True)
class Summary:
    """State of an evaluation."""

    num_wanted: int
    num_scored: int
    failures: dict[str, int]
    """Trajectories without a reward, by finish reason: those that were cut off among them."""
    metrics: dict[str, float]
    """`rollout_metrics/...` of trajectories that ended by themselves."""

    @property
    def is_complete(self) -> bool:
        return self.num_scored == self.num_wanted

    def __str__(self) -> str:
        without = "".join(f", {count} {reason}" for reason, count in self.failures.items())
        missing = self.num_wanted - self.num_scored - sum(self.failures.values())
        return f"{self.num_scored} of {self.num_wanted} trajectories are scored{without}, {missing} not started"


class Evaluation:
    """One output file: which trajectories it should have, and which it has. Held by one process at a time.

    Args:
        runner: writes to `path`.
        settings: dotted name -> value of all that trajectories depend on.

    Raises:
        ConfigError: the file belongs to another evaluation, or another process writes it.
    """

    def __init__(self, runner: AgentRunner, rows: Sequence[Row], path: Path, settings: Mapping[str, object]) -> None:
        self.runner, self.rows, self.path = runner, rows, path
        self.size = runner.num_trajectories(val_mode=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened to append: "w" would empty the settings of the evaluation that holds the lock.
        self._lock = path.with_name(f"{path.name}.settings.json").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_settings(settings)
        except BlockingIOError as held:
            self._lock.close()
            raise ConfigError(f"--output {path}: another evaluation is writing it") from held
        except ConfigError:
            self._lock.close()
            raise

    def _check_settings(self, settings: Mapping[str, object]) -> None:
        # As read back from a file (lists instead of tuples, for example), so that a comparison finds no differences.
        settings = json.loads(json.dumps(settings))
        if not self.path.exists():
            # Settings without trajectories are not binding.
            self._lock.truncate(0)
            self._lock.write(json.dumps(settings, indent=2) + "\n")
            self._lock.flush()
            return
        self._lock.seek(0)
        try:
            known = json.loads(self._lock.read())
        except ValueError:
            raise ConfigError(
                f"--output {self.path}: the file exists and is not from an evaluation; use another file"
            ) from None
        for name in sorted({*known, *settings}):
            if known.get(name) != settings.get(name):
                raise ConfigError(
                    f"{name} is {settings.get(name)!r}, but the trajectories in {self.path} were made with "
                    f"{known.get(name)!r}: set another --output"
                )

    def results(self) -> dict[tuple[int, int], TrajectoryResult]:
        """Return the last recorded result of each requested trajectory, by (position, trajectory id)."""
        if not self.path.exists():
            return {}
        found = {key: to_result(record) for key, record in last_records(self.path).items()}
        return {key: found[key] for key in sorted(found) if key[0] < len(self.rows) and key[1] < self.size}

    async def run(self) -> None:
        """Run missing and failed trajectories.

        Raises:
            UnavailableError: a required service does not respond; nothing was started.
            BatchFailedError: too many consecutive trajectories failed. Finished ones are kept.
        """
        finished = {key for key, result in self.results().items() if _is_scored(result)}
        if len(finished) == self.size * len(self.rows):
            return
        section = self.runner.cfg.dispatcher
        # All concurrent trajectories may fail together; only as many further failures end the evaluation.
        patience = max(10, 2 * (section.val_config.max_parallel_agents or section.max_parallel_agents))
        in_a_row: list[TrajectoryResult] = []
        # Closed here, also at a break or a cancellation: unfinished trajectories are written while the file is held.
        async with aclosing(self.runner.results(self.rows, val_mode=True, skip=finished)) as results:
            async for _, result in results:
                in_a_row = [] if _is_scored(result) else [*in_a_row, result]
                if len(in_a_row) >= patience:
                    break
        if len(in_a_row) >= patience or not any(map(_is_scored, self.results().values())):
            check_batch([result.failure for result in in_a_row], [False] * len(in_a_row))

    def summary(self) -> Summary:
        """Summarize the results in the file."""
        found = self.results()
        without = Counter(str(result.finish_reason) for result in found.values() if not _is_scored(result))
        groups: dict[int, list[TrajectoryResult]] = {}
        for (position, _), result in found.items():
            if result.finish_reason != CANCELLED:
                groups.setdefault(position, []).append(result)
        generator = self.runner.cfg.generator
        rows = training_rows([*groups.values()], generator.max_prompt_length, profile_tools=generator.profile_tools)
        num_scored = len(found) - without.total()
        return Summary(self.size * len(self.rows), num_scored, dict(without), rows.rollout_metrics if groups else {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def _is_scored(result: TrajectoryResult) -> bool:
    return result.failure is None and result.reward is not None


def collect_settings(cfg: TaskFile, rows: Path, tokenizer: str) -> JsonObject:
    """Return the inputs of trajectories by dotted name: the task file except for `FREE`, the rows, the tokenizer."""
    digest = hashlib.sha256(rows.expanduser().read_bytes()).hexdigest()
    flat = {name: value for name, value in _flatten(cfg.model_dump(mode="json")) if not name.startswith(FREE)}
    return flat | {"rows": digest, "--tokenizer": tokenizer}


def _flatten(values: Row, prefix: str = "") -> list[tuple[str, object]]:
    found = []
    for name, value in values.items():
        found += _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return found


async def run_until_stopped(evaluation: Evaluation) -> signal.Signals | None:
    """Run an evaluation. SIGINT or SIGTERM ends it in order, a second one at once.

    Returns: the signal that ended it.
    """
    loop, stopped = asyncio.get_running_loop(), []
    work = asyncio.ensure_future(evaluation.run())

    def stop(number: signal.Signals) -> None:
        stopped.append(number)
        work.cancel()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await work
    except asyncio.CancelledError:
        if not stopped:
            raise
    return stopped[0] if stopped else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: the exit status: 0 if all trajectories have a reward, 1 if some failed, 2 if nothing works, 128 + the
        signal's number if one ended it.
    """
    options = _build_parser().parse_args(arguments)
    try:
        cfg = load_task_file(options.task)
        name = options.tokenizer or cfg.generator.backend_config.get("model_name")
        if name is None:
            raise ConfigError("--tokenizer is required, because generator.backend_config has no model_name")
        path = options.output or cfg.output.trajectories or _get_default_output(options, cfg)
        cfg = cfg.model_copy(update={"output": cfg.output.model_copy(update={"trajectories": str(path)})})
        rows = read_rows(options.rows)[: options.limit]
        settings = collect_settings(cfg, options.rows, str(name))
        file = Path(path).expanduser()
        waits = recorded_run(file.parent / "waits", f"evaluation {file.stem}")  # for `skyrl_train.explain`
        with Evaluation(_build_runner(cfg, name), rows, file, settings) as evaluation, waits:
            stopped_by = asyncio.run(run_until_stopped(evaluation))
            summary = evaluation.summary()
    except (AgentError, OSError) as error:
        kept = "; finished trajectories are kept: run again to continue" if isinstance(error, BatchFailedError) else ""
        print(f"{type(error).__name__}: {error}{kept}", file=sys.stderr)
        return 2
    for metric, value in summary.metrics.items():
        print(f"{metric}: {value:.3f}")
    print(f"{summary}; written to {path}")
    if stopped_by is not None:
        print(f"stopped by {stopped_by.name}: run again to continue", file=sys.stderr)
        return 128 + stopped_by
    return 0 if summary.is_complete else 1


def _build_runner(cfg: TaskFile, tokenizer: str) -> AgentRunner:
    from transformers import AutoTokenizer  # slow to import, and an optional dependency

    is_folder = Path(tokenizer).expanduser().is_dir()
    if not is_folder:
        print(
            f"loading the tokenizer {tokenizer} from the hub; use --tokenizer for another one or a folder",
            file=sys.stderr,
        )
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=is_folder)
    except (OSError, ValueError) as error:  # neither a folder nor on the hub, as a served model may have any name
        raise ConfigError(
            f"no tokenizer {tokenizer!r} could be loaded; --tokenizer must be the folder or hub name of the served "
            f"model's tokenizer (default: generator.backend_config.model_name): {str(error).splitlines()[0]}"
        ) from error
    if fault := find_tokenizer_fault(loaded):
        raise ConfigError(f"--tokenizer {tokenizer}: {fault}")
    return AutoAgentRunner.from_task_file(cfg, None, loaded)


def _get_default_output(options: argparse.Namespace, cfg: TaskFile) -> Path:
    model = str(cfg.generator.backend_config.get("model_name", "model")).replace("/", "_")
    return Path("eval") / f"{options.task.stem}-{options.rows.name.partition('.')[0]}-{model}.jsonl"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_agent.evaluate",
        description="Evaluate a task file's agent on dataset rows with the model of an OpenAI-compatible server.",
        epilog="Run the same command again to continue after an interruption and to retry failures.",
    )
    parser.add_argument("task", type=Path, help="task file")
    parser.add_argument("rows", type=Path, help="dataset rows: .parquet, .jsonl, .json (.gz)")
    parser.add_argument("--tokenizer", help="tokenizer of the served model: a folder or hub name; default: model_name")
    parser.add_argument("--limit", type=int, help="maximum number of rows")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: output.trajectories, else eval/*.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
