"""Writes competition problems for `aime`, which reads the last line `Answer: ...` and gives 1 or -1.

    python examples/aime/aime_dataset.py --output_dir ~/data/aime          # DAPO-Math-17k, and AIME 2024 to validate
    python examples/aime/aime_dataset.py --output_dir ~/data/aime --input train.parquet aime_test.jsonl

Columns: `problem` or `question`, and `answer`; or, as published for DAPO (https://arxiv.org/abs/2503.14476), `prompt`
(messages that ask for the `Answer:` line) and `reward_model`: the prompt is kept unchanged. Exact duplicates are
dropped (DAPO-Math-17k has each row about a hundred times), and then every prompt that still has several answers.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Row, build, make_parser

from skyrl_gym.datasets.mathematics import NewAimeRows


def without_disputed_answers(rows: list[Row]) -> list[Row]:
    """Drop every prompt that has more than one distinct answer: at most one of them can be right."""
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        answers[_prompt_of(row)].add(row["reward_model"]["ground_truth"])
    return [row for row in rows if len(answers[_prompt_of(row)]) == 1]


def _prompt_of(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def main(argv: list[str] | None = None) -> None:
    hub = ("BytedTsinghua-SIA/DAPO-Math-17k@train", "BytedTsinghua-SIA/AIME-2024@train")
    parser = make_parser(__doc__, "~/data/aime", hub)
    columns = ("problem|question|prompt", "answer|reward_model")
    build(parser.parse_args(argv), NewAimeRows(), columns, without_disputed_answers)


if __name__ == "__main__":
    main()
