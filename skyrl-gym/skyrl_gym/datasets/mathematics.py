"""Rows of mathematical problems: GSM8K for `gsm8k`, MATH for `math`, AIME and DAPO-Math for `aime`."""

import json
import re

from skyrl_gym.datasets.problems import Problem, Row, first
from skyrl_gym.envs.aime.env import INSTRUCTION as AIME_INSTRUCTION
from skyrl_gym.envs.math.env import INSTRUCTION as MATH_INSTRUCTION
from skyrl_gym.error import TaskError
from skyrl_gym.graders.math_text import last_boxed_only_string, remove_boxed

GSM8K = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Reason step by step, and write the final number after "#### " on the last line.'

_FINAL_NUMBER = re.compile(r"#### *(-?[0-9][0-9.,]*)")


def final_number(answer: str) -> str:
    """Return the number after the solution's last `####`, without thousands separators.

    Raises:
        TaskError: the solution has no `####`.
    """
    found = _FINAL_NUMBER.findall(answer)
    if not found:
        raise TaskError(f'a GSM8K answer must end with "#### number"; got {answer[-80:]!r}')
    return found[-1].replace(",", "").rstrip(".")


def gsm8k_row(problem: Problem, split: str, index: int, instruction: str = GSM8K_INSTRUCTION) -> Row:
    """Make a row of `question` and `answer`, the published solution, which ends with "#### number"."""
    question, answer = first(problem, "question"), first(problem, "answer")
    return {
        "data_source": GSM8K,
        "prompt": [{"role": "user", "content": f"{question} {instruction}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": final_number(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def math_row(problem: Problem, split: str, index: int) -> Row | None:
    r"""Make a row from `problem` or `question`, and `answer` or `solution`, whose last `\boxed{}` is the answer.

    Returns: None for a solution without a box.
    """
    question, answer = first(problem, "problem|question"), problem.get("answer")
    if answer is None:
        box = last_boxed_only_string(first(problem, "solution"))
        if box is None:
            return None
        answer = remove_boxed(box)
    return {
        "data_source": str(problem.get("data_source") or "math"),
        "prompt": [{"role": "user", "content": f"{question} {MATH_INSTRUCTION}"}],
        "env_class": "math",
        "reward_spec": {"method": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "question": question, "level": str(problem.get("level", ""))},
    }


def aime_row(problem: Problem, split: str, index: int) -> Row:
    """Make a row from `problem` or `question` and `answer`; or from `prompt` and `reward_model`, as published for DAPO,
    with the prompt unchanged."""
    prompt, answer = problem.get("prompt"), problem.get("answer")
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": f"{first(problem, 'problem|question|prompt')}\n\n{AIME_INSTRUCTION}"}]
    if answer is None:
        answer = first(problem, "reward_model")["ground_truth"]
    return {
        "data_source": str(problem.get("data_source") or "aime"),
        "prompt": prompt,
        "env_class": "aime",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index},
    }


class NewAimeRows:
    """Row function that leaves out exact duplicates: in data source, prompt, ability and reward model."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, problem: Problem, split: str, index: int) -> Row | None:
        row = aime_row(problem, split, index)
        key = [split, row["data_source"], row["prompt"], problem.get("ability"), problem.get("reward_model")]
        text = json.dumps([*key, row["reward_model"]["ground_truth"]], sort_keys=True)
        if text in self._seen:
            return None
        self._seen.add(text)
        return row
