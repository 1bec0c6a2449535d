"""Hard questions answered by web research, graded by an LLM judge."""

from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.tasks.base import Instance, Judgement, TaskRowError
from skyrl_agent.tasks.grading import extract_boxed_answer, extract_final_text, run_grader
from skyrl_agent.tasks.judges import JudgedTask
from skyrl_agent.tasks.rows import add_system_message, field, get_question, golds_of, messages_of
from skyrl_agent.types import Message, TrajectoryResult
from skyrl_gym.graders import qa, reward_of

PROMPTS = ("prompt", "raw_prompt", "Question", "question")
REFERENCES = (
    "instance.answer",
    "answer",
    "extra_info.reference_answer",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
)
SYSTEM_PROMPT = (
    "You research hard questions. Break a question into facts that can be looked up, search for them with "
    "search_engine, and read the pages that matter with web_browser, telling it what you want to know. Trust what "
    "several sources say, and compute what must be computed. When you are sure, call finish with a short explanation "
    "and exactly one final answer in \\boxed{}."
)


class WebResearchTask(JudgedTask):
    r"""Task with reward 1 or 0, which compares the last `\boxed{}` of the response with the row's reference: as
    normalized text if `extra_info.answer_type` is `exactMatch`, otherwise by a judge. Rows without a reference are
    rejected.

    Args:
        judge: settings of the judge, see `tasks.judges.make_judge`.
    """

    tools = ("search_engine", "web_browser", "finish")

    def check_row(self, instance: Instance) -> None:
        try:
            messages_of(instance.row, *PROMPTS)
            golds_of(instance.row, *REFERENCES)
        except TaskRowError as failure:
            raise TaskRowError(f"WebResearchTask, instance {instance.instance_id}: {failure}") from failure
        if not _is_exact(instance):
            _ = self.judge  # raises ConfigError without one

    def get_instruction(self, instance: Instance) -> list[Message]:
        return add_system_message(messages_of(instance.row, *PROMPTS), SYSTEM_PROMPT)

    async def evaluate_result(
        self, result: object, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        """Raises InfraError if the judge fails."""
        answer = extract_boxed_answer(extract_final_text(result))
        if answer is None or not answer.strip():
            return Judgement(0.0, {"boxed": 0.0})
        golds = golds_of(instance.row, *REFERENCES)
        if _is_exact(instance):
            return Judgement(float(qa.em_check(answer, golds)), {"boxed": 1.0})
        question = get_question(messages_of(instance.row, *PROMPTS))
        grade = await run_grader(self.judge.grade, question, " or ".join(golds), answer)
        return Judgement(reward_of(grade), {"boxed": 1.0})


def _is_exact(instance: Instance) -> bool:
    return field(instance.row, "extra_info.answer_type", "answer_type") == "exactMatch"
