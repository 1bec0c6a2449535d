"""Writes GSM8K for `llm_as_a_judge`, where a language model compares the answer with the reference.

python examples/llm_as_a_judge/llm_as_a_judge_dataset.py --output_dir ~/data/gsm8k_llm_judge [--input FILE ...]

Columns: `question` and `answer` (the published solution, which ends with "#### number"). The reference is the number.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, make_parser
from gsm8k.gsm8k_dataset import COLUMNS, HUB

from skyrl_gym.datasets.mathematics import final_number, gsm8k_row

INSTRUCTION = "Reason step by step, and end with the answer."


def training_row(problem: Problem, split: str, index: int) -> Row:
    reward_spec = {"method": "judge", "ground_truth": final_number(problem["answer"])}
    row = gsm8k_row(problem, split, index, INSTRUCTION)
    return row | {"env_class": "llm_as_a_judge", "reward_spec": reward_spec}


def main(argv: list[str] | None = None) -> None:
    build(make_parser(__doc__, "~/data/gsm8k_llm_judge", HUB).parse_args(argv), training_row, COLUMNS)


if __name__ == "__main__":
    main()
