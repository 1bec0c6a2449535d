"""Questions about a text longer than the context, read by section with a memory that the model writes."""

from collections.abc import Mapping
from typing import Literal, get_args

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.tasks.base import Instance, Judgement, TaskRowError
from skyrl_agent.tasks.grading import extract_final_text, extract_short_answer, run_grader
from skyrl_agent.tasks.judges import JudgedTask
from skyrl_agent.tasks.rows import get_question, golds_of, messages_of
from skyrl_agent.tools.memory import split_sections
from skyrl_agent.types import Message, TrajectoryResult
from skyrl_gym.graders import Grade, qa, reward_of

QUESTIONS = ("question", "prompt", "raw_prompt")
ANSWERS = ("reward_model.ground_truth", "reward_spec.ground_truth", "golden_answers", "answers", "answer")
Grader = Literal["em", "subem", "f1", "judge"]

SYSTEM_PROMPT = (
    "You answer questions about long texts. You see a text only through next_with_summary, one section at a time, and "
    "keep nothing but your own summary. When the last section is read, call finish with the answer alone: a name, a "
    "number, a few words."
)


class MemoryAgentTask(JudgedTask):
    """A row has a `context` (a text, or a list of documents), a `question` and its `golden_answers`. Each section
    starts the conversation over, so that a trajectory is several training rows with one reward.

    Args:
        grader: `em` (exact match after normalization), `f1`, `judge`; `subem` is for evaluation only.
        judge: settings of the judge, see `tasks.judges.make_judge`.
    """

    tools = ("next_with_summary", "finish")

    def __init__(self, *, grader: Grader = "em", judge: Mapping[str, object] | None = None) -> None:
        if grader not in get_args(Grader):
            raise ConfigError(f"task_config.grader must be one of {', '.join(get_args(Grader))}; got {grader!r}")
        super().__init__(judge)
        self._grader = grader
        if grader == "judge":
            _ = self.judge  # raises ConfigError without one

    def check_row(self, instance: Instance) -> None:
        try:
            messages_of(instance.row, *QUESTIONS)
            golds_of(instance.row, *ANSWERS)
            split_sections(instance.row.get("context"), most=1 << 40)
        except TaskRowError as failure:
            raise TaskRowError(f"MemoryAgentTask, instance {instance.instance_id}: {failure}") from failure

    def get_instruction(self, instance: Instance) -> list[Message]:
        question = get_question(messages_of(instance.row, *QUESTIONS))
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {
                "role": "user",
                "content": f"<problem>\n{question}\n</problem>\n\nCall next_with_summary for the first section.",
            },
        ]

    async def evaluate_result(
        self, result: object, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        """Grade the final response; 0 without one. Raises InfraError if the judge fails."""
        answer = extract_short_answer(extract_final_text(result))
        if not answer:
            return Judgement(0.0, {"answered": 0.0})
        grade = await run_grader(self._grade, answer, instance)
        return Judgement(reward_of(grade), {"answered": 1.0})

    def _grade(self, answer: str, instance: Instance) -> Grade:
        golds = golds_of(instance.row, *ANSWERS)
        if self._grader == "judge":
            return self.judge.grade(get_question(messages_of(instance.row, *QUESTIONS)), " or ".join(golds), answer)
        return {"em": qa.exact_match, "subem": qa.substring_match, "f1": qa.f1}[self._grader](answer, golds)
