r"""Writes mathematics problems for `math`, which compares what the last `\boxed{}` holds by value.

    python examples/math/math_dataset.py --output_dir ~/data/math                       # MATH from the hub
    python examples/math/math_dataset.py --output_dir ~/data/math --input train.jsonl math500_test.jsonl.gz

Columns: `problem` or `question`, and `answer` (LaTeX or a number) or `solution`, with the answer in its last
`\boxed{}`. Solutions without a box are dropped.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser

from skyrl_gym.datasets.mathematics import math_row


def main(argv: list[str] | None = None) -> None:
    hub = ("DigitalLearningGmbH/MATH-lighteval@train", "HuggingFaceH4/MATH-500@test")
    parser = make_parser(__doc__, "~/data/math", hub)
    build(parser.parse_args(argv), math_row, ("problem|question", "answer|solution"))


if __name__ == "__main__":
    main()
