"""Questions with gradable answers: mathematics, programs, short facts, and answers for an LLM judge."""

from collections.abc import Mapping

from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.tasks.base import Instance, Judgement, TaskRowError
from skyrl_agent.tasks.general_react.sources import Kind, get_kind, merge_sources
from skyrl_agent.tasks.grading import extract_final_text, run_grader
from skyrl_agent.tasks.judges import JudgedTask
from skyrl_agent.tasks.rows import add_system_message, field, get_question, messages_of
from skyrl_agent.types import Message, TrajectoryResult
from skyrl_gym.graders import reward_of

PROMPTS = ("raw_prompt", "prompt")


class GeneralReactTask(JudgedTask):
    """Prompt and judge follow from the row's data source, by the table in `sources`.

    Args:
        judge: settings of the judge for kinds that need one, see `tasks.judges.make_judge`.
        sources: more data sources: beginning of the name -> kind.
    """

    tools = ("finish",)

    def __init__(self, *, judge: Mapping[str, object] | None = None, sources: Mapping[str, str] | None = None) -> None:
        super().__init__(judge)
        self._sources = merge_sources(sources)

    def check_row(self, instance: Instance) -> None:
        try:
            kind = self._get_kind(instance)
            self.get_instruction(instance)
            kind.gold(instance.row)
        except TaskRowError as failure:
            raise TaskRowError(f"{type(self).__name__}, instance {instance.instance_id}: {failure}") from failure
        if kind.needs_judge:
            _ = self.judge  # raises ConfigError without one

    def get_instruction(self, instance: Instance) -> list[Message]:
        return add_system_message(messages_of(instance.row, *PROMPTS), self._get_kind(instance).system_prompt)

    async def evaluate_result(
        self, result: object, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        """Grade the final response; 0 without one. Raises InfraError if the judge or the sandbox fails."""
        kind, text = self._get_kind(instance), extract_final_text(result)
        if not text:
            return Judgement(0.0, {"answered": 0.0})
        question = get_question(messages_of(instance.row, *PROMPTS))
        judge = self.judge if kind.needs_judge else None
        reward = reward_of(await run_grader(kind.grade, text, kind.gold(instance.row), question, judge))
        return Judgement(reward, {"answered": 1.0})

    def _get_kind(self, instance: Instance) -> Kind:
        """Return the kind of an instance; without `data.data_source_key`, the row's own `data_source`."""
        source = instance.data_source
        if source == "default":
            source = str(field(instance.row, "data_source") or source)
        return get_kind(source, self._sources)


class DummyReactTask(GeneralReactTask):
    """Task that uses the row's prompt unchanged, for experiments. Graded as in `GeneralReactTask`."""

    def get_instruction(self, instance: Instance) -> list[Message]:
        return messages_of(instance.row, "prompt", "raw_prompt")
