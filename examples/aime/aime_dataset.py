"""Writes competition problems for `aime`, which reads the last line `Answer: ...` and gives 1 or -1.

    python examples/aime/aime_dataset.py --output_dir ~/data/aime          # DAPO-Math-17k, and AIME 2024 to validate
    python examples/aime/aime_dataset.py --output_dir ~/data/aime --input train.parquet aime_test.jsonl

Columns: `problem` or `question`, and `answer`; or, as published for DAPO (https://arxiv.org/abs/2503.14476), `prompt`
(messages that ask for the `Answer:` line) and `reward_model`: the prompt is kept as it is. Exact duplicates are left
out (DAPO-Math-17k has each row about a hundred times), and then every prompt that still has several answers.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser

from skyrl_gym.envs.aime.env import INSTRUCTION


class NewRows:
    """Makes rows of problems that are not exact duplicates: in data source, prompt, ability and reward model."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, problem: Problem, split: str, index: int) -> Row | None:
        row = training_row(problem, split, index)
        key = [split, row["data_source"], row["prompt"], problem.get("ability"), problem.get("reward_model")]
        text = json.dumps([*key, row["reward_model"]["ground_truth"]], sort_keys=True)
        if text in self._seen:
            return None
        self._seen.add(text)
        return row


def without_disputed_answers(rows: list[Row]) -> list[Row]:
    """Drop every prompt that has more than one distinct answer: at most one of them can be right."""
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        answers[_prompt_of(row)].add(row["reward_model"]["ground_truth"])
    return [row for row in rows if len(answers[_prompt_of(row)]) == 1]


def _prompt_of(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


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
    columns = ("problem|question|prompt", "answer|reward_model")
    build(parser.parse_args(argv), NewRows(), columns, without_disputed_answers)


if __name__ == "__main__":
    main()
