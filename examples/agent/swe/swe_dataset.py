"""Rows of software tasks that carry their own files, for `LocalSWETask`.

    python examples/agent/swe/swe_dataset.py --output_dir ~/data/agent_swe     # four small programs
    python examples/agent/swe/swe_dataset.py --output_dir ~/data/agent_swe \\
        --input quixbugs.jsonl.gz --validation_share 0.2

Columns: `files` {path: text}, `test_cmd`, `edit_file` or `edit_files`; `instructions` or `problem_statement`, `id`.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import buggy_programs
from dataset_files import Problem, Row, build, first, hold_out, make_parser, texts, write

from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.local_swe import LocalSWETask

STATEMENT = "problem_statement|instructions"


def row_of(problem: Problem, split: str, index: int) -> Row | None:
    """Make the row of a problem, without the solution. Tables have one type per column, so the files are JSON."""
    row = {
        "data_source": problem.get("data_source") or "local_swe",
        "id": str(problem.get("id") or f"{split}-{index}"),
        "files": json.dumps(problem["files"]),
        "test_cmd": problem["test_cmd"],
        "edit_files": texts(first(problem, "edit_files|edit_file")),
    }
    if any(problem.get(name) for name in STATEMENT.split("|")):
        row["problem_statement"] = first(problem, STATEMENT)
    return row | {"prompt": LocalSWETask().get_instruction(Instance(row, row["id"]))}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/agent_swe", (None, None))
    options = parser.parse_args(argv)
    if options.input or options.hub_train or options.hub_test:
        build(options, row_of, ("files", "test_cmd", "edit_files|edit_file"))
        return
    made = hold_out({"train": buggy_programs.rows(), "test": []}, options.validation_share or 0.25)
    rows = {
        split: [row for index, problem in enumerate(problems) if (row := row_of(problem, split, index))]
        for split, problems in made.items()
    }
    write(rows, options.output_dir)


if __name__ == "__main__":
    main()
