"""Writes requests for `tool_call`, answered by function calls: problems of the Berkeley Function-Calling Leaderboard.

    python examples/tool_call/tool_call_dataset.py --output_dir ~/data/tool_call --validation_share 0.1 \\
        --input BFCL_v3_simple.json BFCL_v3_parallel.json BFCL_v3_irrelevance.json

Columns: `id`, `question` (one turn of messages), `function` (schemas), and `ground_truth`, the accepted calls. As
published, `ground_truth` is in the file of the same name in the adjacent folder `possible_answer`; problems whose
id names `irrelevance` expect no call.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser

from skyrl_gym.datasets.function_calls import bfcl_row, load_accepted_calls


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__, "~/data/tool_call", (None, None)).parse_args(argv)
    folders_and_files = [path.expanduser() for path in options.input or []]
    files = [file for path in folders_and_files for file in (path.iterdir() if path.is_dir() else [path])]
    answers = {name: calls for file in files for name, calls in load_accepted_calls(file).items()}
    build(options, functools.partial(bfcl_row, answers=answers), ("id", "question", "function"))


if __name__ == "__main__":
    main()
