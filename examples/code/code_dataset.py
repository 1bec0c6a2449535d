"""Writes programming problems for `code`, which runs the tests of each on the answer's code.

    python examples/code/code_dataset.py --output_dir ~/data/code                             # MBPP from the hub
    python examples/code/code_dataset.py --input mbpp_train.jsonl humaneval_test.jsonl.gz

Columns, as these sets are published:

    MBPP            `text` or `prompt`, `code`, `test_list`, maybe `test_setup_code`
    HumanEval       `prompt`, `entry_point`, `test`, maybe `canonical_solution`
    CodeContests    `prompt` or `description`, `inputs` and `outputs`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser

from skyrl_gym.datasets.programs import code_row


def main(argv: list[str] | None = None) -> None:
    hub = ("google-research-datasets/mbpp:full@train", "google-research-datasets/mbpp:full@test")
    build(make_parser(__doc__, "~/data/code", hub).parse_args(argv), code_row, ("test_list|inputs|test",))


if __name__ == "__main__":
    main()
