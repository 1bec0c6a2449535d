"""Rows of questions for `search`, as in Search-R1."""

from typing import Any

from skyrl_gym.datasets.problems import Problem, Row, first, texts
from skyrl_gym.envs.search.examples import INSTRUCTION

SYSTEM_PROMPT = "You are a helpful and harmless assistant."
ANSWERS = "reward_model|golden_answers|answers|answer"


class SearchRows:
    """Row function that remembers the instruction which the data brings, for rows that have none."""

    def __init__(self) -> None:
        self.template: tuple[str, str] = (f"{INSTRUCTION}\n\nQuestion: ", "")
        """Text before and after the question."""

    def __call__(self, problem: Problem, split: str, index: int) -> Row | None:
        question = first(problem, "question").strip()
        asked = get_user_message(problem)
        if asked is None:
            before, after = self.template
            asked = before + (question.removesuffix("?") if after.startswith("?") else question) + after
        elif question in asked:
            before, _, after = asked.rpartition(question)
            self.template = before, after
        return search_row(problem, question, asked, split, index)


def get_user_message(problem: Problem) -> str | None:
    """Return the text of a row's own prompt; None without one."""
    messages = problem.get("prompt")
    if isinstance(messages, str):
        return messages
    return next((message["content"] for message in messages or [] if message["role"] == "user"), None)


def search_row(problem: Problem, question: str, asked: str, split: str, index: int) -> Row | None:
    """Make a row with the user message `asked`. Returns None if the problem has no accepted answers."""
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
    """Read a published `reward_model`, or answers. Blank answers are dropped."""
    target = answers["ground_truth"]["target"] if isinstance(answers, dict) else answers
    return {"style": "rule", "ground_truth": {"target": [text for text in texts(target) if text.strip()]}}
