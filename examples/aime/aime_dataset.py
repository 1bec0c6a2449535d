"""Writes competition problems for `aime`, which reads the last line `Answer: ...` and gives 1 or -1.

    python examples/aime/aime_dataset.py --output_dir ~/data/aime          # DAPO-Math-17k, and AIME 2024 to validate
    python examples/aime/aime_dataset.py --output_dir ~/data/aime --input train.parquet aime_test.jsonl

Columns: `problem` or `question`, and `answer`; or, as published for DAPO (https://arxiv.org/abs/2503.14476), `prompt`
(messages that ask for the `Answer:` line) and `reward_model`. A problem that comes again is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser

from skyrl_gym.envs.aime.env import INSTRUCTION


class NewRows:
    """Makes rows of problems that were not there before."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def __call__(self, problem: Problem, split: str, index: int) -> Row | None:
        row = training_row(problem, split, index)
        key = (split, row["prompt"][-1]["content"])
        if key in self._seen:
            return None
        self._seen.add(key)
        return row


def training_row(problem: Problem, split: str, index: int) -> Row:
    prompt, answer = problem.get("prompt"), problem.get("answer")
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": f"{first(problem, 'problem|question|prompt')}\n\n{INSTRUCTION}"}]
    if answer is None:
        answer = problem["reward_model"]["ground_truth"]
    return {
        "data_source": str(problem.get("data_source") or "aime"),
        "prompt": prompt,
        "env_class": "aime",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index},
    }


def main(argv: list[str] | None = None) -> None:
    hub = ("BytedTsinghua-SIA/DAPO-Math-17k@train", "BytedTsinghua-SIA/AIME-2024@train")
    parser = make_parser(__doc__, "~/data/aime", hub)
    build(parser.parse_args(argv), NewRows(), ("problem|question|prompt", "answer|reward_model"))


if __name__ == "__main__":
    main()
