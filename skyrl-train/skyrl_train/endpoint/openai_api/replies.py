"""Response under construction: the request, and the conversion of tokens to the JSON of its kind.

`ChatReply` and `CompletionReply` differ in JSON fields only; frontend and stream treat them alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from skyrl_gym.chat.tool_calls import before_tool_calls, split_tool_calls
from skyrl_train.endpoint.openai_api.generation import GeneratedChoice, Prompt, find_stop
from skyrl_train.endpoint.openai_api.payloads import (
    Envelope,
    Payload,
    Written,
    build_assistant_message,
    build_chat_logprobs,
    build_completion_logprobs,
    build_usage,
    call_deltas,
)
from skyrl_train.endpoint.openai_api.prompts import EndpointTemplate
from skyrl_train.endpoint.openai_api.response_format import ThoughtMode
from skyrl_train.endpoint.openai_api.schema import ChatRequest, CompletionRequest
from skyrl_train.endpoint.openai_api.thoughts import Thinking, split_thought
from skyrl_train.endpoint.openai_api.tool_calls import ToolSyntax
from skyrl_train.inference_engines.base import TopLogProbs

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Reply(ABC):
    """Response to one request, made of its completions.

    Args:
        prompts: prompts of the engine requests; choice `index` belongs to prompt `index // num_choices`.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        template: EndpointTemplate,
        envelope: Envelope,
        prompts: Sequence[Prompt],
    ):
        self.request = request
        self.template = template
        self.envelope = envelope
        self.prompts = list(prompts)
        self._complete: dict[int, tuple[GeneratedChoice, Written]] = {}

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.request.num_choices

    def read(self, answer: GeneratedChoice) -> Written:
        """Return the response as a client sees it; of a partial one, only the part that cannot change."""
        if answer.stop_reason is None:
            return self._convert_written(answer)
        if id(answer) not in self._complete:  # used by the client, the conversation memory and the recorder
            self._complete[id(answer)] = answer, self._convert_written(answer)
        return self._complete[id(answer)][1]

    def _convert_written(self, answer: GeneratedChoice) -> Written:
        text = self.decode(answer.token_ids)
        if answer.stop_reason is None:
            return Written(self._get_settled(text))
        end, _ = self.stop_text(answer)
        return Written(text if self.request.include_stop_str_in_output else text[:end], (), answer.stop_reason)

    def stop_text(self, answer: GeneratedChoice) -> tuple[int | None, str | None]:
        """Return the start of the stop text that ended a complete response, and the text; (None, None) if none did."""
        if answer.stop_reason != "stop" or not self.request.stop_texts:
            return None, None
        text, known = self.decode(answer.token_ids), len(self.decode(answer.token_ids[:-1]))
        ends = [(find_stop(text, stop, known), stop) for stop in self.request.stop_texts]
        return min(((end, stop) for end, stop in ends if end is not None), default=(None, None))

    def decode(self, ids: list[int]) -> str:
        return self.template.decode(ids, self._skips_special)

    @property
    def _skips_special(self) -> bool:
        return self.request.skip_special_tokens is not False

    def _get_settled(self, text: str) -> str:
        text = text.rstrip(_UNFINISHED)
        held = 0
        if not self.request.include_stop_str_in_output:
            for stop in self.request.stop_texts:
                held = max(held, *(n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n])))
        return text[: len(text) - held]

    def build(self, answers: Sequence[GeneratedChoice]) -> Payload:
        """Build the response object."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return self.envelope.build(choices, answers) | {"usage": self.build_usage(answers)}

    def build_usage(self, answers: Sequence[GeneratedChoice]) -> dict[str, int]:
        return build_usage(sum(len(prompt.ids) for prompt in self.prompts), answers)

    def get_prompt(self, index: int) -> Prompt:
        """Return the prompt of choice `index`."""
        return self.prompts[index // self.request.num_choices]

    def build_token_ids(self, answer: GeneratedChoice, start: int = 0) -> Payload:
        """Return the fields of `return_token_ids`, from token `start` on."""
        if not self.request.return_token_ids:
            return {}
        return {"token_ids": answer.token_ids[start:], "weight_versions": answer.weight_versions[start:]}

    @abstractmethod
    def choice(self, index: int, answer: GeneratedChoice) -> Payload:
        """Build one choice of the response object."""

    @abstractmethod
    def build_first_delta(self, index: int) -> Payload | None:
        """Return the first chunk of a streamed choice, if its kind has one."""

    @abstractmethod
    def delta(self, index: int, answer: GeneratedChoice, text: str, start: int, written: Written) -> Payload:
        """Build one chunk of a streamed choice with new text `text` and the tokens from `start` on."""


class ChatReply(Reply):
    """Response to `POST /v1/chat/completions`.

    Args:
        thought: mode of a thought that is returned separately from the content; `none`: a thought stays in the content.
    """

    request: ChatRequest

    def __init__(
        self,
        request: ChatRequest,
        template: EndpointTemplate,
        envelope: Envelope,
        prompts: Sequence[Prompt],
        tools: ToolSyntax | None,
        thought: ThoughtMode = "none",
    ):
        super().__init__(request, template, envelope, prompts)
        self._tools: ToolSyntax | None = tools
        self._thought: ThoughtMode = thought

    def _convert_written(self, answer: GeneratedChoice) -> Written:
        written = super()._convert_written(answer)
        if self._tools is None:
            return written
        if answer.stop_reason is None:
            return Written(before_tool_calls(written.content, self._tools))
        content, calls = split_tool_calls(written.content, self._tools)
        reason = "tool_calls" if calls and answer.stop_reason == "stop" else answer.stop_reason
        return Written(content, tuple(calls), reason)

    def build(self, answers: Sequence[GeneratedChoice]) -> Payload:
        ids = {"prompt_token_ids": self.prompts[0].ids} if self.request.return_token_ids else {}
        return super().build(answers) | ids

    def choice(self, index: int, answer: GeneratedChoice) -> Payload:
        written = self.read(answer)
        thought, text, _ = self._split(written.content, True)
        return {
            "index": index,
            "message": build_assistant_message(replace(written, content=text), thought),
            "finish_reason": written.finish_reason,
            "logprobs": self._build_logprobs(answer, 0),
        } | self.build_token_ids(answer)

    def build_first_delta(self, index: int) -> Payload:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}

    def delta(self, index: int, answer: GeneratedChoice, text: str, start: int, written: Written) -> Payload:
        before = self._split(written.content[: len(written.content) - len(text)], False)
        after = self._split(written.content, written.finish_reason is not None)
        new = {
            "reasoning_content": (after.thought or "")[len(before.thought or "") :],
            "content": after.text[len(before.text) :],
        }
        delta: Payload = {name: part for name, part in new.items() if part}
        if written.calls:
            delta["tool_calls"] = call_deltas(written.calls)
        return {
            "index": index,
            "delta": delta,
            "finish_reason": written.finish_reason,
            "logprobs": self._build_logprobs(answer, start),
        } | self.build_token_ids(answer, start)

    def _split(self, content: str, is_complete: bool) -> Thinking:
        if self._thought == "none":
            return Thinking(None, content, False)
        return split_thought(content, self._thought == "open", is_complete)

    def _build_logprobs(self, answer: GeneratedChoice, start: int) -> Payload | None:
        if not self.request.logprobs or answer.log_probs is None:
            return None
        top = answer.top
        return build_chat_logprobs(
            self.template,
            answer.token_ids[start:],
            answer.log_probs[start:],
            None if top is None else TopLogProbs(top.ids[start:], top.log_probs[start:]),
        )


class CompletionReply(Reply):
    """Response to `POST /v1/completions`."""

    request: CompletionRequest

    def choice(self, index: int, answer: GeneratedChoice) -> Payload:
        written = self.read(answer)
        prompt = self.get_prompt(index)
        ids = {"prompt_token_ids": prompt.ids} if self.request.return_token_ids else {}
        echoed = self._build_echo(prompt)
        return (
            {
                "index": index,
                "text": echoed + written.content,
                "finish_reason": written.finish_reason,
                "logprobs": self._build_logprobs(prompt, answer, 0, len(echoed), with_prompt=bool(self.request.echo)),
            }
            | ids
            | self.build_token_ids(answer)
        )

    def build_first_delta(self, index: int) -> Payload | None:
        echoed = self._build_echo(self.get_prompt(index))
        return {"index": index, "text": echoed, "finish_reason": None, "logprobs": None} if echoed else None

    def delta(self, index: int, answer: GeneratedChoice, text: str, start: int, written: Written) -> Payload:
        prompt = self.get_prompt(index)
        offset = len(self._build_echo(prompt)) + len(self.decode(answer.token_ids[:start]))
        return {
            "index": index,
            "text": text,
            "finish_reason": written.finish_reason,
            "logprobs": self._build_logprobs(prompt, answer, start, offset, with_prompt=False),
        } | self.build_token_ids(answer, start)

    def _build_echo(self, prompt: Prompt) -> str:
        return self.decode(prompt.ids) if self.request.echo else ""

    def _build_logprobs(
        self, prompt: Prompt, answer: GeneratedChoice, start: int, offset: int, with_prompt: bool
    ) -> Payload | None:
        if self.request.logprobs is None or answer.log_probs is None:
            return None
        ids, values = answer.token_ids[start:], list[float | None](answer.log_probs[start:])
        top: list[tuple[list[int], list[float]] | None] = _list_top(answer.top)[start:]
        if with_prompt and answer.prompt_log_probs is not None:
            ids, values, offset = prompt.ids + ids, [None, *answer.prompt_log_probs, *values], 0
            top = [None, *_list_top(answer.prompt_top), *top]
        return build_completion_logprobs(
            self.template, ids, values, offset, self._skips_special, top if self.request.logprobs else None
        )


def _list_top(top: TopLogProbs | None) -> list[tuple[list[int], list[float]] | None]:
    """List ids and log-probs of the most likely tokens at each position."""
    return [] if top is None else list(zip(top.ids.tolist(), top.log_probs.tolist(), strict=True))
