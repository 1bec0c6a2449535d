"""What an agent puts around the messages of a task: explanations of tools and calls, reminders."""

from collections.abc import Sequence
from typing import Any

from skyrl_agent.agents import prompts
from skyrl_agent.agents.toolbox import Toolbox
from skyrl_agent.config.task_file import GeneratorSection
from skyrl_agent.functional.chat_template import chat_template_of
from skyrl_agent.functional.encoding import MessageEncoder
from skyrl_agent.functional.formats import call_format
from skyrl_agent.types import Message
from skyrl_gym.tools.calls import Invalid, ToolCall


class Framing:
    """
    Raises:
        ConfigError: the chat template or the format of calls is not to be had.
    """

    def __init__(self, settings: GeneratorSection, toolbox: Toolbox, tokenizer: Any) -> None:
        self.settings, self.toolbox, self.tokenizer = settings, toolbox, tokenizer
        self.format = call_format(settings.tool_format)
        self.chat_template = chat_template_of(settings.chat_template, settings.qwen3_acc_thinking)

    @property
    def sampling_params(self) -> dict[str, Any]:
        return {"skip_special_tokens": False} if self.format.keeps_special_tokens else {}

    def encoder(self, with_tools: bool = True) -> MessageEncoder:
        return MessageEncoder(
            self.tokenizer,
            tools=self.toolbox.schemas if with_tools and self.format.schemas_in_template else None,
            chat_template=self.chat_template,
            template_kwargs={"enable_thinking": self.settings.qwen3_enable_thinking},
        )

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """The first messages, with what tools and format have to say in the system message."""
        before = "\n\n---\n\n".join(self.toolbox.system_prompt_prefixes())
        after = self.format.system_suffix(self.toolbox.schemas) if self.toolbox.schemas else ""
        return prompts.with_system_text(messages, before, after)

    def opening_anew(self, messages: Sequence[Message]) -> list[Message]:
        """Those of a conversation that starts over. A system message says it all already: a tool had it from there."""
        return list(messages) if any(message["role"] == "system" for message in messages) else self.opening(messages)

    def calls(self, text: str) -> list[ToolCall | Invalid]:
        return self.format.parse(text, self.toolbox.schemas)

    def answer(self, text: str, calls: Sequence[ToolCall | Invalid]) -> Message:
        text = text.removesuffix(self.tokenizer.eos_token)  # some servers leave it there
        return self.format.answer_message(text, [call for call in calls if isinstance(call, ToolCall)])

    def as_read_later(self, answer: Message) -> Message:
        return prompts.without_thoughts(answer) if self.settings.remove_think_tokens else answer

    def results(self, calls: Sequence[ToolCall | Invalid], texts: Sequence[str]) -> list[Message]:
        """What came of the calls, or that there was none."""
        told = [(call if isinstance(call, ToolCall) else None, text) for call, text in zip(calls, texts, strict=True)]
        return self.format.result_messages(told or [(None, prompts.no_call(list(self.toolbox.tools)))])

    def reminded(self, messages: Sequence[Message], step: int, tokens_left: int) -> list[Message]:
        """Before step `step`, counted from 1."""
        settings = self.settings
        if not settings.enable_turn_reminder or step > settings.max_iterations:
            return list(messages)
        text = prompts.reminder(step, settings.max_iterations, settings.early_step_threshold, tokens_left)
        return prompts.with_reminder(messages, text)
