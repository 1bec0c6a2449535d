"""Messages added to a task's prompt: explanations of tools and calls, results, reminders."""

from collections.abc import Sequence
from functools import cached_property

from skyrl_agent.agents import prompts
from skyrl_agent.agents.toolbox import Toolbox
from skyrl_agent.chat.chat_template import get_configured_chat_template
from skyrl_agent.chat.encoding import MessageEncoder
from skyrl_agent.config.task_file import GeneratorSection
from skyrl_agent.errors import ConfigError
from skyrl_agent.types import JsonObject, Message, Tokenizer
from skyrl_gym.chat.template import ChatTemplate
from skyrl_gym.chat.tool_calls import Invalid, ToolCall
from skyrl_gym.chat.tool_formats import TOOL_FORMATS, Result
from skyrl_gym.chat.turn_ends import TurnEnds


class PromptBuilder:
    """Builder of an agent's messages.

    Raises:
        ConfigError: the chat template or the tool format is unknown.
    """

    def __init__(self, settings: GeneratorSection, toolbox: Toolbox, tokenizer: Tokenizer) -> None:
        self.settings, self.toolbox, self.tokenizer = settings, toolbox, tokenizer
        if settings.tool_format not in TOOL_FORMATS:
            raise ConfigError(
                f"generator.tool_format must be one of {', '.join(TOOL_FORMATS)}; got {settings.tool_format!r}"
            )
        self.format = TOOL_FORMATS[settings.tool_format]
        if settings.append_only and settings.remove_think_tokens:
            raise ConfigError(
                "generator.append_only=true keeps the model's output unchanged, but "
                "generator.remove_think_tokens=true removes its reasoning; set only one of them"
            )
        self.chat_template = get_configured_chat_template(settings.chat_template, settings.qwen3_acc_thinking)

    @cached_property
    def _turn_ends(self) -> TurnEnds:
        return ChatTemplate(self.tokenizer, self.chat_template).turn_ends

    @property
    def sampling_params(self) -> JsonObject:
        """Sampling parameters that the tool format and the chat template need."""
        shown = {"skip_special_tokens": False} if self.format.keeps_special_tokens else {}
        if self.tokenizer is None:  # an agent built only to validate its settings
            return dict(shown)
        return self._turn_ends.add_stop_ids(self.settings.sampling_params) | shown

    def encoder(self, with_tools: bool = True) -> MessageEncoder:
        """Build an encoder for the settings."""
        return MessageEncoder(
            self.tokenizer,
            tools=self.toolbox.schemas if with_tools and self.format.schemas_in_template else None,
            chat_template=self.chat_template,
            template_kwargs={"enable_thinking": self.settings.qwen3_enable_thinking},
        )

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """Build the first messages, with the explanation of tools in the system message."""
        before = "\n\n---\n\n".join(self.toolbox.collect_system_prompt_prefixes())
        after = self.format.system_suffix(self.toolbox.schemas) if self.toolbox.schemas else ""
        return prompts.add_system_text(messages, before, after)

    def build_restarted_opening(self, messages: Sequence[Message]) -> list[Message]:
        """Build the first messages of a conversation that starts over. A system message, which a tool copied from the
        conversation, has the explanation already."""
        return list(messages) if any(message["role"] == "system" for message in messages) else self.opening(messages)

    def calls(self, text: str) -> list[ToolCall | Invalid]:
        """Parse the calls in a response."""
        return self.format.parse(text, self.toolbox.schemas)

    def answer(self, text: str, calls: Sequence[ToolCall | Invalid]) -> Message:
        """Build the message of a response."""
        text = self._turn_ends.strip(text)  # some servers include it
        return self.format.answer_message(text, [call for call in calls if isinstance(call, ToolCall)])

    def strip_for_later_turns(self, answer: Message) -> Message:
        """Remove the thoughts of a response, if `remove_think_tokens` is set."""
        return prompts.remove_thoughts(answer) if self.settings.remove_think_tokens else answer

    def results(self, calls: Sequence[ToolCall | Invalid], texts: Sequence[str]) -> list[Message]:
        """Build the messages of results, or of the fact that there was no call."""
        results: list[Result] = list(zip(calls, texts, strict=True))
        return self.format.result_messages(results or [(None, prompts.render_no_call(list(self.toolbox.tools)))])

    def add_step_reminder(self, messages: Sequence[Message], step: int, tokens_left: int) -> list[Message]:
        """Add the reminder of step `step`, counted from 1, if reminders are enabled."""
        settings = self.settings
        if not settings.enable_turn_reminder or step > settings.max_iterations:
            return list(messages)
        text = prompts.render_reminder(step, settings.max_iterations, settings.early_step_threshold, tokens_left)
        return prompts.append_reminder(messages, text)
