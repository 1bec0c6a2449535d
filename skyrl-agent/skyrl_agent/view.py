"""`python -m skyrl_agent.view FILE`: the trajectories of a run, in the terminal or in the dashboard. Works piped, too.

view FILE                                   a line each
view FILE --reason FINISH_TOOL --max-reward 0.5
view FILE --show 3                          one in full, by its number in the list
view trajectories.jsonl --browser           turns, tools, branches and stages in the dashboard of skyrl-train
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from skyrl_agent.records import last_records, read_records
from skyrl_agent.types import JsonObject

_WRITTEN, _GIVEN = "green", "dim"
_WIDTH_PIPED = 200
DASHBOARD_NAME = "trajectories.jsonl"
"""Name of the files that `skyrl_train.dashboard` knows as trajectories of agents."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _build_parser().parse_args(arguments)
    if options.browser:
        return open_dashboard(options.file)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_PIPED, highlight=False)
    try:
        records = list(enumerate(last_records(options.file).values() if options.last else read_records(options.file)))
    except OSError as error:
        print(f"{options.file}: {error.strerror}", file=sys.stderr)
        return 1
    if options.show is not None:
        if not 0 <= options.show < len(records):
            print(f"--show {options.show}: the file has trajectories 0 to {len(records) - 1}", file=sys.stderr)
            return 1
        show(console, records[options.show][1])
        return 0
    list_all(console, [(number, record) for number, record in records if _is_selected(record, options)])
    return 0


def open_dashboard(path: str) -> int:
    """Replace this process by the dashboard of a file. Returns 1 if that is not possible."""
    file = Path(path).expanduser()
    if not file.is_file() or file.name != DASHBOARD_NAME:
        why = "the file does not exist" if not file.is_file() else f"the dashboard reads files named {DASHBOARD_NAME}"
        print(f"{file}: {why}; rename it in output.trajectories, or remove --browser", file=sys.stderr)
        return 1
    if find_spec("skyrl_train") is None:
        print("--browser needs skyrl-train: install skyrl-agent[skyrl-train]", file=sys.stderr)
        return 1
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "skyrl_train.dashboard", str(file), "--port", "0", "--open"])


def list_all(console: Console, records: Sequence[tuple[int, JsonObject]]) -> None:
    """Print a line per trajectory and a summary of finish reasons."""
    names = ("#", "instance", "traj", "val", "reward", "steps", "tokens", "finish reason", "failure")
    table = Table(*(Column(name, no_wrap=True) for name in names), box=None, pad_edge=False)
    for number, record in records:
        failure = record["failure"]
        table.add_row(
            str(number),
            escape(str(record["instance_id"])),
            str(record["trajectory_id"]),
            "val" if record["val"] else "",
            _format_number(record["reward"]),
            str(record["num_steps"]),
            str(sum(sum(row["mask"]) for row in record["rows"])),
            escape(str(record["finish_reason"])),
            "" if failure is None else escape(f"{failure['kind']}: {failure['message']}"[:60]),
        )
    console.print(table)
    reasons = Counter(str(record["finish_reason"]) for _, record in records)
    rewards = [record["reward"] for _, record in records if record["reward"] is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g} of {len(rewards)}" if rewards else ""
    console.print(f"{len(records)} trajectories{mean}; " + ", ".join(f"{n} {r}" for r, n in reasons.most_common()))


def show(console: Console, record: JsonObject) -> None:
    """Print one trajectory in full: reward, tool calls, messages, and tokens coloured by mask."""
    console.rule(escape(f"{record['instance_id']} trajectory {record['trajectory_id']}"))
    for key in ("finish_reason", "reward", "reward_parts", "failure", "stage_seconds", "metrics"):
        if record[key] not in (None, {}):
            console.print(Text(f"{key:14} {_format_plain(record[key])}"), soft_wrap=True)
    for call in record["tool_calls"]:
        mark = "" if call["ok"] else " (failed)"
        console.print(
            Text(f"step {call['step']} {call['name']}{mark} {call['seconds']:.3f} s {_format_plain(call['arguments'])}")
        )
    for message in record["messages"]:
        console.rule(str(message.get("role")), align="left", characters="·")
        console.print(Text(_format_plain(message.get("content"))), soft_wrap=True)
        if message.get("tool_calls"):
            console.print(Text(_format_plain(message["tool_calls"])), soft_wrap=True)
    for number, row in enumerate(record["rows"]):
        written, length = sum(row["mask"]), len(row["response_ids"])
        console.rule(f"row {number}: prompt {len(row['prompt_ids'])}, response {length}, written {written} tokens")
        console.print(Text(row["prompt"], style=_GIVEN), soft_wrap=True)
        for is_written, text in row["spans"]:
            console.print(_render_span(console, is_written, text), soft_wrap=True)


def _render_span(console: Console, is_written: bool, text: str) -> Text:
    """Render a span; without colours, a bar marks each generated line."""
    if console.is_terminal:
        return Text(text, style=_WRITTEN if is_written else _GIVEN)
    return Text("\n".join(f"{'|' if is_written else ' '} {line}" for line in text.split("\n")))


def _is_selected(record: JsonObject, options: argparse.Namespace) -> bool:
    reward = record["reward"]
    return (
        (options.reason is None or str(record["finish_reason"]) == options.reason)
        and (options.instance is None or str(record["instance_id"]) == options.instance)
        and (options.min_reward is None or (reward is not None and reward >= options.min_reward))
        and (options.max_reward is None or (reward is not None and reward <= options.max_reward))
        and (not options.failed or record["failure"] is not None)
    )


def _format_plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m skyrl_agent.view", description="Show trajectories.")
    parser.add_argument("file", help="the file of output.trajectories in the task file")
    parser.add_argument("--show", type=int, metavar="N", help="show one trajectory in full")
    parser.add_argument("--browser", action="store_true", help="show the file in the dashboard (needs skyrl-train)")
    parser.add_argument("--reason", help="only trajectories with this finish reason")
    parser.add_argument("--instance", help="only trajectories with this instance id")
    parser.add_argument("--min-reward", type=float)
    parser.add_argument("--max-reward", type=float)
    parser.add_argument("--last", action="store_true", help="only the last attempt of each trajectory of an evaluation")
    parser.add_argument("--failed", action="store_true", help="only failed trajectories")
    return parser


if __name__ == "__main__":
    sys.exit(main())
