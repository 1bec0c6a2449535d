"""Writes `train.parquet` and `validation.parquet` of GSM8K's published solutions, as conversations to learn from.

python examples/sft/gsm8k_demonstrations.py --output_dir ~/data/gsm8k_sft                      # from the hub
python examples/sft/gsm8k_demonstrations.py --output_dir ~/data/gsm8k_sft --input FOLDER       # train.*, test.* there
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, make_parser

HUB = ("openai/gsm8k:main@train", "openai/gsm8k:main@test")


def demonstration(problem: Problem, split: str, index: int) -> Row:
    """One problem and its solution."""
    return {
        "messages": [
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": problem["answer"]},
        ],
        "extra_info": {"split": split, "index": index},
    }


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__, "~/data/gsm8k_sft", HUB).parse_args(argv)
    build(options, demonstration, ("question", "answer"))


if __name__ == "__main__":
    main()
