"""Writes questions for `search`, whose model looks things up in a retrieval server, as in Search-R1.

    python examples/search/searchr1_dataset.py --local_dir ~/data/searchR1
    python examples/search/searchr1_dataset.py --local_dir ~/data/searchR1 --input nq.jsonl.gz --validation_share 0.1

The user message is the row's own `prompt`, where it has one, as those of PeterJinGo/nq_hotpotqa_train: published
figures rest on its words. A row without one gets the instruction of the row before that has one, or else ours.

Columns: `question`, and the accepted answers: `golden_answers`, `answers` or `answer` (a text or several), or
`reward_model` with `ground_truth.target`; and `data_source`, the set a question is from.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser, texts

from skyrl_gym.envs.search.examples import INSTRUCTION

SYSTEM_PROMPT = "You are a helpful and harmless assistant."
ANSWERS = "reward_model|golden_answers|answers|answer"


class Rows:
    """Makes rows; remembers the instruction that the data brings, for rows that have none."""

    def __init__(self) -> None:
        self.template: tuple[str, str] = (f"{INSTRUCTION}\n\nQuestion: ", "")
        """Text before and after the question."""

    def __call__(self, problem: Problem, split: str, index: int) -> Row | None:
        question = problem["question"].strip()
        asked = user_message(problem)
        if asked is None:
            before, after = self.template
            asked = before + (question.removesuffix("?") if after.startswith("?") else question) + after
        elif question in asked:
            before, _, after = asked.rpartition(question)
            self.template = before, after
        return training_row(problem, question, asked, split, index)


def user_message(problem: Problem) -> str | None:
    """Return the text of a row's own prompt; None without one."""
    messages = problem.get("prompt")
    if isinstance(messages, str):
        return messages
    return next((message["content"] for message in messages or [] if message["role"] == "user"), None)


def training_row(problem: Problem, question: str, asked: str, split: str, index: int) -> Row | None:
    reward = reward_spec(first(problem, ANSWERS))
    if not reward["ground_truth"]["target"]:
        return None
    source = f"searchR1_{problem.get('data_source') or 'qa'}"
    ground_truth = reward["ground_truth"]
    tool = {"ground_truth": ground_truth, "question": question, "data_source": source}
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": asked},
        ],
        "env_class": "search",
        "reward_spec": reward,
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": tool}},
        },
    }


def reward_spec(answers: Any) -> dict[str, Any]:
    """From a `reward_model` as it is published, or from answers. Answers of nothing but space are dropped."""
    target = answers["ground_truth"]["target"] if isinstance(answers, dict) else answers
    return {"style": "rule", "ground_truth": {"target": [text for text in texts(target) if text.strip()]}}


def main(argv: list[str] | None = None) -> None:
    source = "PeterJinGo/nq_hotpotqa_train"
    parser = make_parser(__doc__, "~/data/searchR1", (f"{source}@train", f"{source}@test"))
    build(parser.parse_args(argv), Rows(), ("question", ANSWERS))


if __name__ == "__main__":
    main()
