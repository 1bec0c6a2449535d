r"""Writes multiplication problems for `multiply`, which reads the product in `\boxed{}` and lets the model try again.

    python examples/multiply/multiply_dataset.py --output_dir ~/data/multiply --num_digits 2 \
        --train_size 10000 --test_size 200

No validation problem is in the training file; training problems may repeat. The rows are the same for the same seed.
"""

import argparse
import random
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Row, write

from skyrl_train.errors import DataError

HELD_OUT_SHARE = 8
"""One problem in so many is for validation only."""
INSTRUCTION = r"Reason step by step, and put the product in \boxed{}, as digits alone."


def training_row(left: int, right: int, split: str, index: int) -> Row:
    question = f"What is {left} * {right}?"
    return {
        "data_source": "synthetic_multiply",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": "multiply",
        "reward_spec": {"method": "rule", "ground_truth": str(left * right)},
        "extra_info": {"split": split, "index": index, "question": question},
    }


def make_rows(num_digits: int, num_rows: int, split: str, seed: int) -> list[Row]:
    """Raises DataError unless there are digits and rows."""
    if num_digits < 1 or num_rows < 1:
        raise DataError(f"--num_digits and sizes must be at least 1; got {num_digits} and {num_rows}")
    draw = random.Random(f"{seed}/{split}")
    lowest, highest = 10 ** (num_digits - 1), 10**num_digits - 1
    rows: list[Row] = []
    while len(rows) < num_rows:
        left, right = draw.randint(lowest, highest), draw.randint(lowest, highest)
        if is_held_out(left, right) == (split == "test"):
            rows.append(training_row(left, right, split, len(rows)))
    return rows


def is_held_out(left: int, right: int) -> bool:
    """A property of the problem, whichever way round it stands, so that no two files can disagree about it."""
    return zlib.crc32(f"{min(left, right)}*{max(left, right)}".encode()) % HELD_OUT_SHARE == 0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("~/data/multiply"), help="folder to write")
    parser.add_argument("--num_digits", type=int, default=2, help="of both factors; default: %(default)s")
    parser.add_argument("--train_size", type=int, default=10000, help="default: %(default)s")
    parser.add_argument("--test_size", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    sizes = {"train": options.train_size, "test": options.test_size}
    rows = {split: make_rows(options.num_digits, size, split, options.seed) for split, size in sizes.items()}
    write(rows, options.output_dir)


if __name__ == "__main__":
    main()
