"""`python -m skyrl_gym.eval`."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_gym.error import Error
from skyrl_gym.eval.runner import Stopped, evaluate
from skyrl_gym.eval.settings import EvalSettings, SettingsError
from skyrl_gym.eval.suite_runs import SuiteValues, format_suites_table, lines_of, plan_suites, write_lines
from skyrl_gym.eval.suites import ELSEWHERE, GROUPS, SUITES
from skyrl_gym.eval.summary import table

EPILOG = """Run the same command again to continue after an interruption and to retry failed episodes. Exit code:
0 if every episode is scored, 1 if some failed, 2 if the evaluation could not run, 130 or 143 if Ctrl-C or SIGTERM
stopped it: unfinished episodes are written up to that point (`cancelled`) and never scored."""


DATA_HELP = """rows of --env: .parquet or .jsonl with a column prompt (default: its own examples). With --suite: a file,
or a folder of files, named like suites; NAME=FILE; or NAME=hub:SET@SPLIT. May be repeated (default: the hub)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = vars(_build_parser().parse_args(arguments))
    run = _evaluate_suites if "suite" in options else _evaluate_environment
    terminated: list[int] = []

    def terminate(number: int, _: object) -> None:
        if not terminated:  # another one must not interrupt what is written
            terminated.append(number)
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGTERM, terminate)
    try:
        is_complete = run(options, not options.pop("quiet"))
    except (Error, OSError) as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        if isinstance(stop, Stopped):
            print(table(stop.summary))
        print("\nstopped; finished episodes are kept: run again to continue", file=sys.stderr)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0 if is_complete else 1


def _evaluate_environment(options: dict[str, Any], progress: bool) -> bool:
    """Evaluate on one environment. Returns: whether every episode is scored."""
    data = options.pop("data", [])
    if len(data) > 1:
        raise SettingsError(f"--data can be set only once with --env; got {', '.join(data)}")
    output = options.pop("output") or Path("eval") / _check_folder_name(f"{options['env']}-{options['model']}")
    settings = EvalSettings(**options, output=output, data=Path(data[0]) if data else None)
    summary = evaluate(settings, progress=progress)
    print(table(summary))
    print(f"written to {output}")
    return summary.is_complete


def _evaluate_suites(options: dict[str, Any], progress: bool) -> bool:
    """Evaluate on benchmark suites, one after the other. Returns: whether every episode is scored."""
    names, data = options.pop("suite"), options.pop("data", [])
    output = options.pop("output") or Path("eval") / _check_folder_name(f"suites-{options['model']}")
    plans = plan_suites(names, data, output, options)
    finished: list[SuiteValues] = []
    is_complete = True
    try:
        for plan in plans:
            left_out = f", {plan.num_left_out} problems skipped" if plan.num_left_out else ""
            print(f"{plan.name}: {plan.num_tasks} tasks of {plan.source}{left_out}", flush=True)
            summary = plan.run(progress=progress)
            is_complete = is_complete and summary.is_complete
            finished.append(SuiteValues.read(plan))
            print(table(summary) + "\n", flush=True)
    finally:
        if finished:  # also where a later suite fails or is stopped
            lines = lines_of(finished)
            write_lines(output, lines)
            print(format_suites_table(lines))
            print(f"written to {output}")
    return is_complete


def _check_folder_name(text: str) -> str:
    return text.replace("/", "_").replace(":", ".")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.eval",
        description="Evaluate the model of an OpenAI-compatible endpoint on an environment or on benchmarks.",
        epilog=EPILOG,
        argument_default=argparse.SUPPRESS,  # defaults have one home: EvalSettings
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--env", help="a registered id, or package.module:Class")
    what.add_argument(
        "--suite", type=_split_names, metavar="NAME,NAME", help=f"benchmark suites or groups: {_check_suites()}"
    )
    add("--base-url", required=True, metavar="URL", help="base URL of the server, including /v1")
    add("--model", required=True, metavar="NAME", help="model name on the server")
    add("--data", action="append", metavar="FILE", help=DATA_HELP)
    add("--output", type=Path, default=None, metavar="DIR", help="output folder (default: eval/ENV-MODEL)")
    add("--num-samples", type=int, metavar="N", help="episodes per task (default: 1, or the suite's)")
    add("--pass-k", type=_parse_numbers, metavar="K,K", help="values of k for pass@k (default: 1, or the suite's)")
    add("--limit", type=int, metavar="N", help="only the first N tasks")
    add("--max-turns", type=int, metavar="N", help="turn limit that overrides the rows' own")
    add("--env-config", type=_parse_json_object, metavar="JSON", help="settings of the environment")
    add("--success-at", type=float, metavar="R", help="outcome reward that counts as success (default: 1)")
    add("--temperature", type=float, help="default: the server's, or the suite's")
    add("--top-p", type=float, help="default: the server's, or the suite's")
    add(
        "--max-tokens", type=int, metavar="N", help="maximum tokens of one turn (default: the server's, or the suite's)"
    )
    add(
        "--stop",
        type=str,
        action="append",
        metavar="TEXT",
        help="stop string that ends a turn and is kept in it; may be repeated",
    )
    add("--seed", type=int, help="seed for environments with randomness")
    add("--extra-body", type=_parse_json_object, metavar="JSON", help="additional fields of each request")
    add("--api-key-env", metavar="NAME", help="environment variable with the API key (default: OPENAI_API_KEY)")
    add("--concurrency", type=int, metavar="N", help="concurrent episodes (default: 16)")
    add("--max-retries", type=int, metavar="N", help="retries of a failed request (default: 5)")
    add(
        "--retry-seconds",
        type=float,
        metavar="S",
        help="seconds before the first retry, doubled each time (default: 1)",
    )
    add(
        "--request-timeout",
        dest="request_seconds",
        type=float,
        metavar="S",
        help="timeout of one request in seconds (default: 600)",
    )
    add(
        "--episode-timeout",
        dest="episode_seconds",
        type=float,
        metavar="S",
        help="timeout of an episode in seconds (default: 3600)",
    )
    add("--quiet", action="store_true", default=False, help="no progress bar")
    return parser


def _check_suites() -> str:
    return ", ".join([*SUITES, *GROUPS, *ELSEWHERE])


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be comma-separated numbers, such as 1,4; got {text!r}") from None


def _parse_json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as failure:
        raise argparse.ArgumentTypeError(f"is not JSON: {failure}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object; got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
