"""Agent loop: query the model, run its calls, append their results, until an end condition holds."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from skyrl_agent.agents import prompts
from skyrl_agent.agents.model import Model
from skyrl_agent.agents.pending import Pending
from skyrl_agent.agents.prompt_builder import PromptBuilder
from skyrl_agent.agents.repetition import Repetition
from skyrl_agent.agents.toolbox import Toolbox
from skyrl_agent.chat.conversation import Conversation
from skyrl_agent.chat.transitions import Transition
from skyrl_agent.config.task_file import GeneratorSection
from skyrl_agent.errors import ConfigError
from skyrl_agent.finish import (
    BAD_LLM_RESPONSE,
    CONTEXT_WINDOW_EXCEEDED,
    FINISH,
    FINISH_TOOL,
    MAX_ITERATIONS_REACHED,
    STUCK_IN_A_LOOP,
)
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.tools.base import ToolContext, ToolEntry, ToolOutput
from skyrl_agent.tools.factory import make_tools
from skyrl_agent.types import InferBackend, JsonObject, Message, Tokenizer, ToolCallRecord
from skyrl_gym.chat.tool_calls import Invalid, ToolCall
from skyrl_gym.waits import waiting

logger = logging.getLogger(__name__)

_warned_of_rows: set[int] = set()


class Outcome(NamedTuple):
    """End of an agent."""

    finish_reason: str
    result: str | None = None
    """The agent's answer; None if it gave none."""


@dataclass
class StepBudget:
    """Steps left to all sub-agents of a trajectory together."""

    left: int

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


class Agent:
    """Agent loop of a model and its tools, for one attempt at an instance.

    The loop ends

    - when a tool requests it (`FINISH_TOOL`);
    - at a response without tool calls (`FINISH`); with a tool `finish`, the model gets a reminder instead;
    - at a truncated response, or when no tokens are left for one (`CONTEXT_WINDOW_EXCEEDED`);
    - at an empty response (`BAD_LLM_RESPONSE`);
    - after repeated equal turns (`stuck_in_a_loop`);
    - after `max_iterations` responses.

    Parser and tool errors are returned to the model as text.

    Args:
        traj_config: the task file's `generator`, or a `TrajectoryConfig`.
        tools: replace `traj_config.tools`.
        max_depth: depth of sub-agents; 1: this agent may start some, they may not.
        sub_agent_steps: steps of all sub-agents of a trajectory together; None: `max_iterations`.
        max_repeats: number of equal turns, or rounds of the same two turns, that end the agent.
        parent: the agent that started this sub-agent.

    Raises:
        ConfigError: a tool, its settings or one of these limits is wrong.
    """

    default_tools: ClassVar[Sequence[str]] = ()
    """Tools if neither the task file nor the task names any."""

    def __init__(
        self,
        traj_config: Any,
        infer_engine: InferBackend,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[ToolEntry] | None = None,
        runtime: Runtime | None = None,
        trajectory_id: str | None = None,
        max_depth: int = 1,
        sub_agent_steps: int | None = None,
        max_repeats: int = 4,
        parent: "Agent | None" = None,
    ) -> None:
        _check_limits(max_depth=(max_depth, 0), sub_agent_steps=(sub_agent_steps, 1), max_repeats=(max_repeats, 2))
        self.settings, self.infer_engine, self.tokenizer = _parse_settings(traj_config), infer_engine, tokenizer
        self.tools = list(tools if tools is not None else getattr(traj_config, "tools", None) or self.default_tools)
        self.runtime, self.max_depth, self.max_repeats = runtime, max_depth, max_repeats
        self.agent_id = uuid.uuid4().hex
        self.trajectory_id = trajectory_id or self.agent_id
        self.depth = parent.depth + 1 if parent else 0
        self.step_budget = parent.step_budget if parent else StepBudget(sub_agent_steps or self.settings.max_iterations)

        self.pending = Pending()
        own_tools = make_tools(self.tools)
        if self.depth == max_depth:
            own_tools = [tool for tool in own_tools if tool.name != "delegate"]
        self.toolbox = Toolbox(
            own_tools,
            self.pending,
            timeout=self.settings.tool_timeout_seconds,
            max_chars=self.settings.max_tool_output_chars,
            max_parallel=self.settings.max_parallel_tool_calls,
            log_level=logging.INFO if self.settings.debug_log else logging.DEBUG,
        )
        self.prompt_builder = PromptBuilder(self.settings, self.toolbox, tokenizer)
        self.model = Model(infer_engine, self.settings, self.pending, self.prompt_builder.sampling_params)
        self.conversation: Conversation | None = None
        self.sub_agents: list[Agent] = []
        self.outcome: Outcome | None = None
        self.num_steps = 0

    @classmethod
    def tool_entries(cls, tools: Sequence[ToolEntry] | Mapping[str, object] | None, task: BaseTask) -> list[ToolEntry]:
        """Return the task file's `tools` as a list.

        Raises:
            ConfigError: they are flags, which this agent does not take.
        """
        if isinstance(tools, Mapping):
            raise ConfigError(
                f"tools: {cls.__name__} takes a list of names, such as [finish] (CodeActAgent takes flags); got {tools}"
            )
        return list(tools if tools is not None else task.tools or cls.default_tools)

    async def run(
        self, instruction: Sequence[Message], instance: Instance | Mapping[str, Any] | None = None
    ) -> Outcome:
        """Run the agent from the first messages to its end.

        Raises:
            InfraError: the model or a tool's service failed or timed out.
            BackendError: the model's server refused a request.
        """
        row = instance.row if isinstance(instance, Instance) else instance or {}
        self._context = ToolContext(
            self.trajectory_id, row, self.runtime, ask=self.ask, run_agent=self.run_agent, messages=list(instruction)
        )
        async with self.toolbox.open_all(self._context):
            self.outcome = await self._run_turns(instruction)
        self._log_row_warning()
        return self.outcome

    def _log_row_warning(self) -> None:
        """Warn, once per number of rows, that the chat template makes training more expensive."""
        conversation = self.conversation
        if conversation is None or not conversation.breaks or len(conversation.breaks) in _warned_of_rows:
            return
        _warned_of_rows.add(len(conversation.breaks))
        logger.warning(
            "the %d turns of a trajectory make %d training rows with about %.1f times the tokens of one row, because "
            "the chat template rewrites earlier messages; generator.append_only: true makes one row",
            self.num_steps,
            len(conversation.breaks) + 1,
            conversation.token_factor,
        )

    async def _run_turns(self, instruction: Sequence[Message]) -> Outcome:
        self._repetition = Repetition(self.max_repeats)
        opening = self.prompt_builder.add_step_reminder(
            self.prompt_builder.opening(instruction), 1, self.settings.max_prompt_length
        )
        self.conversation = conversation = Conversation(
            self.prompt_builder.encoder(), opening, self.settings.append_only
        )
        while self._can_step():
            input_ids = conversation.input_ids()
            room = self._count_free_tokens(conversation, input_ids)
            if room <= 0:
                return Outcome(CONTEXT_WINDOW_EXCEEDED)
            with waiting(f"the model's answer {self.num_steps + 1}"):
                text, meta = await self.model.answer(input_ids, room, self.agent_id)
            self.num_steps += 1
            is_whole = meta["finish_reason"] != "length"
            calls = self.prompt_builder.calls(text) if is_whole else []
            message = self.prompt_builder.answer(text, calls)
            conversation.add_answer(text, meta, self.prompt_builder.strip_for_later_turns(message))
            if not is_whole:
                return Outcome(CONTEXT_WINDOW_EXCEEDED)
            if not calls and not message["content"].strip():
                return Outcome(BAD_LLM_RESPONSE)
            if not calls and not self.toolbox.has_finish:
                return Outcome(FINISH, message["content"])
            outputs = await self.toolbox.run(calls, self._build_context(conversation), self.num_steps)
            if ending := next((output for output in outputs if output.ends), None):
                return Outcome(FINISH_TOOL, ending.text)
            if self._repetition.add(_build_turn_key(text, calls, outputs)):
                return Outcome(STUCK_IN_A_LOOP)
            self._add_results(conversation, calls, outputs)
        return Outcome(MAX_ITERATIONS_REACHED)

    def _can_step(self) -> bool:
        return self.num_steps < self.settings.max_iterations and (self.depth == 0 or self.step_budget.take())

    def _count_free_tokens(self, conversation: Conversation, input_ids: list[int]) -> int:
        """Return the number of tokens left for a response."""
        room, most = self._count_tokens_left(conversation), self.settings.max_context_length
        return room if most is None else min(room, most - len(input_ids))

    def _count_tokens_left(self, conversation: Conversation) -> int:
        return self.settings.max_prompt_length - conversation.num_response_tokens

    def _add_results(
        self, conversation: Conversation, calls: Sequence[ToolCall | Invalid], outputs: Sequence[ToolOutput]
    ) -> None:
        """Append the results of calls to the conversation, or restart it from the context that a tool returned."""
        step = self.num_steps + 1
        fresh = next((output.new_context for output in outputs if output.new_context is not None), None)
        if fresh is None:
            results = self.prompt_builder.results(calls, [output.text for output in outputs])
            conversation.add(
                *self.prompt_builder.add_step_reminder(results, step, self._count_tokens_left(conversation))
            )
        else:
            self._repetition.clear()
            opening = self.prompt_builder.build_restarted_opening(fresh)
            conversation.restart(self.prompt_builder.add_step_reminder(opening, step, self.settings.max_prompt_length))

    def _build_context(self, conversation: Conversation) -> ToolContext:
        return replace(self._context, messages=prompts.remove_reminders(conversation.messages))

    async def ask(self, messages: list[Message]) -> str:
        """Return the model's response to messages outside the conversation. It is not trained on."""
        input_ids = Conversation(self.prompt_builder.encoder(with_tools=False), messages).input_ids()
        room, most = self.settings.max_prompt_length, self.settings.max_context_length
        room = room if most is None else min(room, most - len(input_ids))
        if room <= 0:
            raise ValueError(f"the prompt has {len(input_ids)} tokens, but generator.max_context_length is {most}")
        text, _ = await self.model.answer(input_ids, room, f"{self.agent_id}-beside")
        return text

    async def run_agent(
        self, instruction: str, tools: Sequence[ToolEntry] | None = None, max_iterations: int | None = None
    ) -> str:
        """Run a sub-agent with a separate conversation on the same runtime.

        Args:
            tools: tools of the sub-agent; None: this agent's tools.

        Returns:
            The sub-agent's final response, or the reason why it has none.

        Raises:
            ValueError: `max_depth` is exceeded, or no steps are left for sub-agents.
        """
        if self.depth >= self.max_depth:
            raise ValueError(f"sub-agents may be {self.max_depth} deep, and this one is: do the work yourself")
        if self.step_budget.left <= 0:
            raise ValueError("the steps for sub-agents are used up: do the work yourself")
        steps = max_iterations or self.settings.max_iterations
        sub_agent = type(self)(
            self.settings.model_copy(update={"max_iterations": steps}),
            self.infer_engine,
            self.tokenizer,
            tools=self.tools if tools is None else tools,
            runtime=self.runtime,
            trajectory_id=self.trajectory_id,
            max_depth=self.max_depth,
            max_repeats=self.max_repeats,
            parent=self,
        )
        self.sub_agents.append(sub_agent)
        messages = [{"role": "system", "content": prompts.SUB_AGENT}, {"role": "user", "content": instruction}]
        outcome = await sub_agent.run(messages, self._context.row)
        return outcome.result or f"The sub-agent ended without an answer: {outcome.finish_reason}."

    def cancel(self) -> None:
        """Cancel all its waits, which include its sub-agents."""
        self.pending.cancel()

    def get_messages(self) -> list[Message]:
        return list(self.conversation.messages) if self.conversation else []

    def get_transitions(self) -> list[Transition]:
        """Return the transitions of each sub-agent, which make separate rows, followed by this agent's."""
        own = self.conversation.transitions if self.conversation else []
        return [*(turn for agent in self.sub_agents for turn in agent.get_transitions()), *own]

    def get_tool_calls(self) -> list[ToolCallRecord]:
        """Return this agent's tool calls, followed by its sub-agents'."""
        return [*self.toolbox.records, *(call for agent in self.sub_agents for call in agent.get_tool_calls())]

    def get_tool_profile(self) -> JsonObject | None:
        """Count calls in total and by name; None unless `profile_tools` is set."""
        if not self.settings.profile_tools:
            return None
        names = [call.name for call in self.get_tool_calls()]
        return {"tool_calls_total": len(names), "tool_calls_by_name": {name: names.count(name) for name in {*names}}}


def _check_limits(**limits: tuple[int | None, int]) -> None:
    for name, (value, least) in limits.items():
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"agent_config.{name} must be an integer of at least {least}; got {value!r}")


def _parse_settings(traj_config: Any) -> GeneratorSection:
    if isinstance(traj_config, GeneratorSection):
        return traj_config
    fields = {name: getattr(traj_config, name, None) for name in GeneratorSection.model_fields}
    return GeneratorSection(**{name: value for name, value in fields.items() if value is not None})


def _build_turn_key(text: str, calls: Sequence[ToolCall | Invalid], outputs: Sequence[ToolOutput]) -> str:
    done = [(call.name, call.arguments) if isinstance(call, ToolCall) else call.reason for call in calls] or text
    return repr((done, [output.text for output in outputs]))
