"""Writes `train.parquet` and `validation.parquet` of GSM8K, in the form that the trainer reads.

    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k                      # from the Hugging Face hub
    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k --input FOLDER       # train.* and test.* there
    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k --input my_train.jsonl.gz my_test.parquet

Columns: `question` and `answer` (the published solution, which ends with "#### number").
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser

from skyrl_gym.datasets.mathematics import GSM8K, gsm8k_row

HUB = (f"{GSM8K}:main@train", f"{GSM8K}:main@test")
COLUMNS = ("question", "answer")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/gsm8k", HUB)
    build(parser.parse_args(argv), gsm8k_row, COLUMNS)


if __name__ == "__main__":
    main()
