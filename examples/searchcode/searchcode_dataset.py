"""Writes GSM8K, or other questions with a number as answer, for `searchcode`: two tools, a search engine and Python.

python examples/searchcode/searchcode_dataset.py --output_dir ~/data/searchcode [--input FILE ...]

Columns: `question` and `answer` (a solution that ends with "#### number").
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, make_parser
from gsm8k.gsm8k_dataset import COLUMNS, HUB

from skyrl_gym.datasets.mathematics import gsm8k_row
from skyrl_gym.envs.searchcode.examples import INSTRUCTION


def training_row(problem: Problem, split: str, index: int) -> Row:
    return gsm8k_row(problem, split, index, INSTRUCTION) | {"env_class": "searchcode"}


def main(argv: list[str] | None = None) -> None:
    build(make_parser(__doc__, "~/data/searchcode", HUB).parse_args(argv), training_row, COLUMNS)


if __name__ == "__main__":
    main()
