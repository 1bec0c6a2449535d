"""Answers to research questions by a judge at STEM_LLM_JUDGE_URL, as published."""

from skyrl_agent.tasks.grading import extract_boxed_answer, extract_final_text
from skyrl_agent.tasks.judges import make_judge
from skyrl_agent.types import Row
from skyrl_gym.graders import qa, reward_of

__all__ = ["compute_score"]


def compute_score(data_source: str, output: str, gt: str, extra_info: Row | None = None) -> float:
    """Return 1 if the last box is equivalent to the reference, else 0; 0 without a box. `extra_info` may have the
    `question`, and the `answer_type` `exactMatch`, which compares text without the judge.

    Raises:
        ConfigError: no judge is configured.
        InfraError: the judge fails.
    """
    answer, info = extract_boxed_answer(extract_final_text(output)), extra_info or {}
    if answer is None:
        return 0.0
    if info.get("answer_type") == "exactMatch":
        return float(qa.em_check(answer, gt))
    with make_judge(None, "stem_llm_judge") as judge:
        return reward_of(judge.grade(str(info.get("question") or ""), gt, answer))
