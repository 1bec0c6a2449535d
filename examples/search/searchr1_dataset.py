"""Writes questions for `search`, in which the model queries a retrieval server, as in Search-R1.

    python examples/search/searchr1_dataset.py --local_dir ~/data/searchR1
    python examples/search/searchr1_dataset.py --local_dir ~/data/searchR1 --input nq.jsonl.gz --validation_share 0.1

The user message is the row's `prompt` if it has one, as in PeterJinGo/nq_hotpotqa_train: published figures depend on
its wording. Other rows get the instruction of the previous row with a prompt, or else ours.

Columns: `question`, and the accepted answers: `golden_answers`, `answers` or `answer` (a text or several), or
`reward_model` with `ground_truth.target`; and `data_source`, the set a question is from.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser

from skyrl_gym.datasets.questions import ANSWERS, SearchRows


def main(argv: list[str] | None = None) -> None:
    source = "PeterJinGo/nq_hotpotqa_train"
    parser = make_parser(__doc__, "~/data/searchR1", (f"{source}@train", f"{source}@test"))
    build(parser.parse_args(argv), SearchRows(), ("question", ANSWERS))


if __name__ == "__main__":
    main()
