"""Writes GSM8K for `gsm8k_multi_turn`, where a wrong answer may be tried again and each turn has a reward.

python examples/gsm8k_multi_turn/gsm8k_multi_turn_dataset.py --output_dir ~/data/gsm8k_multi_turn [--input FILE ...]

Columns: `question` and `answer` (the published solution, which ends with "#### number").
The number of turns is `generator.max_turns`; `--max_turns` is for use without the trainer.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, make_parser
from gsm8k.gsm8k_dataset import COLUMNS, HUB

from skyrl_gym.datasets.mathematics import gsm8k_row

INSTRUCTION = (
    'Reason step by step, and write the number after "#### " on the last line of each answer. You will be told if it '
    "is wrong, and may try again."
)


def training_row(problem: Problem, split: str, index: int, max_turns: int) -> Row:
    row = gsm8k_row(problem, split, index, INSTRUCTION)
    return row | {"env_class": "gsm8k_multi_turn", "extra_info": row["extra_info"] | {"max_turns": max_turns}}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/gsm8k_multi_turn", HUB)
    parser.add_argument("--max_turns", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args(argv)
    build(options, partial(training_row, max_turns=options.max_turns), COLUMNS)


if __name__ == "__main__":
    main()
