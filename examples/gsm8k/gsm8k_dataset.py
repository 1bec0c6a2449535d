"""Writes `train.parquet` and `validation.parquet` of GSM8K, in the form that the trainer reads.

    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k                      # from the Hugging Face hub
    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k --input FOLDER       # train.* and test.* there
    python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k --input my_train.jsonl.gz my_test.parquet

Columns: `question` and `answer` (the published solution, which ends with "#### number").
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, make_parser

from skyrl_train.errors import DataError

DATA_SOURCE = "openai/gsm8k"
HUB = (f"{DATA_SOURCE}:main@train", f"{DATA_SOURCE}:main@test")
COLUMNS = ("question", "answer")
INSTRUCTION = 'Reason step by step, and write the final number after "#### " on the last line.'

_FINAL_NUMBER = re.compile(r"#### *(-?[0-9][0-9.,]*)")


def final_number(answer: str) -> str:
    """The number after the solution's last `####`, without thousands separators. Raises DataError if there is none."""
    found = _FINAL_NUMBER.findall(answer)
    if not found:
        raise DataError(f'a GSM8K answer must end with "#### number"; got {answer[-80:]!r}')
    return found[-1].replace(",", "").rstrip(".")


def training_row(problem: Problem, split: str, index: int, instruction: str = INSTRUCTION) -> Row:
    """One problem as the trainer reads it."""
    question, answer = problem["question"], problem["answer"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {instruction}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": final_number(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/gsm8k", HUB)
    build(parser.parse_args(argv), training_row, COLUMNS)


if __name__ == "__main__":
    main()
