"""Rows for `TerminalTask`.

    python examples/agent/terminal/terminal_dataset.py --output_dir ~/data/agent_terminal      # a few made ones
    python examples/agent/terminal/terminal_dataset.py --output_dir ~/data/agent_terminal \\
        --input nl2bash_tasks.jsonl.gz --nl2bash_setups nl2bash_setups.jsonl.gz --validation_share 0.2

With `--nl2bash_setups` (columns `fs`, `setup`) the input is InterCode's NL2Bash (`query`, `gold`, `fs`; with a column
`verified`, unverified rows are dropped). Otherwise it has the columns of `TerminalTask`.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataset_files import Problem, Row, build, hold_out, make_parser, read_file, write

from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.terminal import TerminalTask
from skyrl_agent.tasks.terminal_rows import nl2bash_row


def made_rows(count: int = 32) -> list[Problem]:
    """Questions about a small tree of log files, and changes to it; the same every time."""
    generator = random.Random(0)
    rows = []
    for number in range(count):
        days = {
            f"logs/day{day}.log": [generator.choice(["ok", "error", "slow"]) for _ in range(20)] for day in range(5)
        }
        files = {path: "".join(f"{n} {word}\n" for n, word in enumerate(words)) for path, words in days.items()}
        errors = {path: words.count("error") for path, words in days.items()}
        worst, least = max(errors.values()), min(errors.values())
        questions: list[Problem] = [
            {
                "instruction": "How many lines in all files of logs/ have the word `error`?",
                "expected_output": str(sum(errors.values())),
            },
            {
                "instruction": f"Delete the files of logs/ that have fewer than {(worst + least + 1) // 2} lines with "
                "the word `error`, and no others.",
                "check": " && ".join(
                    f"test {'!' if found < (worst + least + 1) // 2 else ''} -e {path}"
                    for path, found in errors.items()
                ),
            },
            {
                "instruction": "Give a command that prints the names (without folder) of the files in logs/ that have "
                "no line with the word `slow` among their first five lines, sorted.",
                "gold": "cd logs; for f in *; do head -5 $f | grep -q slow || echo $f; done | sort",
            },
        ]
        rows.append({"id": f"made-{number}", "files": files, **questions[number % len(questions)]})
    return rows


def row_of(problem: Problem, split: str, index: int) -> Row:
    row = {"id": str(problem.get("id") or problem.get("instance_id") or f"{split}-{index}"), "data_source": "terminal"}
    for field in ("instruction", "expected_output", "gold"):
        row[field] = problem.get(field)
    for field in ("files", "setup", "check"):  # tables have one type a column
        value = problem.get(field)
        row[field] = value if value is None or isinstance(value, str) else json.dumps(value)
    TerminalTask().check_row(Instance(row, row["id"]))
    return row | {"prompt": TerminalTask().get_instruction(Instance(row, row["id"]))}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/agent_terminal", (None, None))
    parser.add_argument("--nl2bash_setups", type=Path, help="the scripts that make NL2Bash's four file systems")
    options = parser.parse_args(argv)
    if not (options.input or options.hub_train or options.hub_test):
        made = hold_out({"train": made_rows(), "test": []}, options.validation_share or 0.25)
        rows = {split: [row_of(row, split, index) for index, row in enumerate(found)] for split, found in made.items()}
        write(rows, options.output_dir)
        return
    if options.nl2bash_setups is None:
        build(options, row_of, ("instruction",))
        return
    setups = {row["fs"]: row["setup"] for row in read_file(options.nl2bash_setups.expanduser())}

    def of_nl2bash(problem: Problem, split: str, index: int) -> Row | None:
        return row_of(nl2bash_row(problem, setups), split, index) if problem.get("verified", True) else None

    build(options, of_nl2bash, ("query", "gold", "fs"))


if __name__ == "__main__":
    main()
