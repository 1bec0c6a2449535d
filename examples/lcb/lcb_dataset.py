"""Writes competitive programming problems for `lcb`, with tests in LiveCodeBench's form.

    python examples/lcb/lcb_dataset.py --output_dir ~/data/lcb
    python examples/lcb/lcb_dataset.py --output_dir ~/data/lcb --input train/livecodebench.json test/livecodebench.json

Columns:

    `problem`, `question_content` or `prompt`
    `tests` or `public_test_cases` (a list of `input`, `output`, `testtype`, or its JSON text); or `inputs`, `outputs`
    `starter_code`, if a method of a class is asked for, and `metadata` with its `func_name`

LiveCodeBench's private tests are pickles, which are not read: a pickle can do anything to who opens it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser

from skyrl_gym.datasets.programs import LCB_TESTS, lcb_row


def main(argv: list[str] | None = None) -> None:
    source = "agentica-org/DeepCoder-Preview-Dataset:lcbv5"
    parser = make_parser(__doc__, "~/data/lcb", (f"{source}@train", f"{source}@test"))
    build(parser.parse_args(argv), lcb_row, ("problem|question_content|prompt", LCB_TESTS))


if __name__ == "__main__":
    main()
