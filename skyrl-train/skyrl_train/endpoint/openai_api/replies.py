"""One request on its way to an answer: what was asked, and how tokens become the JSON of its kind.

`ChatReply` and `CompletionReply` differ in words only; the frontend and the stream treat them alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from skyrl_gym.chat.tool_calls import before_tool_calls, split_tool_calls
from skyrl_train.endpoint.openai_api.answer_form import ThoughtMode
from skyrl_train.endpoint.openai_api.generation import GeneratedChoice, Prompt, end_of_stop
from skyrl_train.endpoint.openai_api.payloads import (
    Envelope,
    Payload,
    Written,
    assistant_message,
    call_deltas,
    chat_logprobs,
    completion_logprobs,
    usage,
)
from skyrl_train.endpoint.openai_api.prompts import EndpointTemplate
from skyrl_train.endpoint.openai_api.schema import ChatRequest, CompletionRequest
from skyrl_train.endpoint.openai_api.thoughts import Thinking, split_thought
from skyrl_train.endpoint.openai_api.tool_calls import ToolSyntax
from skyrl_train.inference_engines.base import TopLogProbs

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Reply(ABC):
    """Response to one request, made of its completions.

    Args:
        prompts: what the engine continues; choice `index` belongs to prompt `index // num_choices`.
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
        """The answer as a client sees it: of one that still grows, what will stay whatever follows."""
        if answer.stop_reason is None:
            return self._written(answer)
        if id(answer) not in self._complete:  # read for the client, for the memory and for the recorder
            self._complete[id(answer)] = answer, self._written(answer)
        return self._complete[id(answer)][1]

    def _written(self, answer: GeneratedChoice) -> Written:
        text = self.decode(answer.token_ids)
        if answer.stop_reason is None:
            return Written(self._settled(text))
        end, _ = self.stop_text(answer)
        return Written(text if self.request.include_stop_str_in_output else text[:end], (), answer.stop_reason)

    def stop_text(self, answer: GeneratedChoice) -> tuple[int | None, str | None]:
        """Return the start of the stop text that ended a complete answer, and the text; (None, None): none did."""
        if answer.stop_reason != "stop" or not self.request.stop_texts:
            return None, None
        text, known = self.decode(answer.token_ids), len(self.decode(answer.token_ids[:-1]))
        ends = [(end_of_stop(text, stop, known), stop) for stop in self.request.stop_texts]
        return min(((end, stop) for end, stop in ends if end is not None), default=(None, None))

    def decode(self, ids: list[int]) -> str:
        return self.template.decode(ids, self._skips_special)

    @property
    def _skips_special(self) -> bool:
        return self.request.skip_special_tokens is not False

    def _settled(self, text: str) -> str:
        text = text.rstrip(_UNFINISHED)
        held = 0
        if not self.request.include_stop_str_in_output:
            for stop in self.request.stop_texts:
                held = max(held, *(n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n])))
        return text[: len(text) - held]

    def whole(self, answers: Sequence[GeneratedChoice]) -> Payload:
        """The object that answers the request."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return self.envelope.around(choices, answers) | {"usage": self.usage(answers)}

    def usage(self, answers: Sequence[GeneratedChoice]) -> dict[str, int]:
        return usage(sum(len(prompt.ids) for prompt in self.prompts), answers)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt behind which choice `index` stands."""
        return self.prompts[index // self.request.num_choices]

    def token_ids(self, answer: GeneratedChoice, start: int = 0) -> Payload:
        """Return the fields of `return_token_ids`, from token `start` on."""
        if not self.request.return_token_ids:
            return {}
        return {"token_ids": answer.token_ids[start:], "weight_versions": answer.weight_versions[start:]}

    @abstractmethod
    def choice(self, index: int, answer: GeneratedChoice) -> Payload:
        """One choice of the whole object."""

    @abstractmethod
    def first_delta(self, index: int) -> Payload | None:
        """Return the first chunk of a streamed choice, if its kind has one."""

    @abstractmethod
    def delta(self, index: int, answer: GeneratedChoice, text: str, start: int, written: Written) -> Payload:
        """One step of a streamed choice: `text` is what is new in it, and the tokens from `start` on."""


class ChatReply(Reply):
    """Response to `POST /v1/chat/completions`.

    Args:
        thought: thought that is returned apart from the content, whose form the request asks for; `none`: a thought
            stays in the content.
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

    def _written(self, answer: GeneratedChoice) -> Written:
        written = super()._written(answer)
        if self._tools is None:
            return written
        if answer.stop_reason is None:
            return Written(before_tool_calls(written.content, self._tools))
        content, calls = split_tool_calls(written.content, self._tools)
        reason = "tool_calls" if calls and answer.stop_reason == "stop" else answer.stop_reason
        return Written(content, tuple(calls), reason)

    def whole(self, answers: Sequence[GeneratedChoice]) -> Payload:
        ids = {"prompt_token_ids": self.prompts[0].ids} if self.request.return_token_ids else {}
        return super().whole(answers) | ids

    def choice(self, index: int, answer: GeneratedChoice) -> Payload:
        written = self.read(answer)
        thought, text, _ = self._split(written.content, True)
        return {
            "index": index,
            "message": assistant_message(replace(written, content=text), thought),
            "finish_reason": written.finish_reason,
            "logprobs": self._logprobs(answer, 0),
        } | self.token_ids(answer)

    def first_delta(self, index: int) -> Payload:
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
            "logprobs": self._logprobs(answer, start),
        } | self.token_ids(answer, start)

    def _split(self, content: str, is_complete: bool) -> Thinking:
        if self._thought == "none":
            return Thinking(None, content, False)
        return split_thought(content, self._thought == "open", is_complete)

    def _logprobs(self, answer: GeneratedChoice, start: int) -> Payload | None:
        if not self.request.logprobs or answer.log_probs is None:
            return None
        top = answer.top
        return chat_logprobs(
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
        prompt = self.prompt_of(index)
        ids = {"prompt_token_ids": prompt.ids} if self.request.return_token_ids else {}
        echoed = self._echoed(prompt)
        return (
            {
                "index": index,
                "text": echoed + written.content,
                "finish_reason": written.finish_reason,
                "logprobs": self._logprobs(prompt, answer, 0, len(echoed), with_prompt=bool(self.request.echo)),
            }
            | ids
            | self.token_ids(answer)
        )

    def first_delta(self, index: int) -> Payload | None:
        echoed = self._echoed(self.prompt_of(index))
        return {"index": index, "text": echoed, "finish_reason": None, "logprobs": None} if echoed else None

    def delta(self, index: int, answer: GeneratedChoice, text: str, start: int, written: Written) -> Payload:
        prompt = self.prompt_of(index)
        offset = len(self._echoed(prompt)) + len(self.decode(answer.token_ids[:start]))
        return {
            "index": index,
            "text": text,
            "finish_reason": written.finish_reason,
            "logprobs": self._logprobs(prompt, answer, start, offset, with_prompt=False),
        } | self.token_ids(answer, start)

    def _echoed(self, prompt: Prompt) -> str:
        return self.decode(prompt.ids) if self.request.echo else ""

    def _logprobs(
        self, prompt: Prompt, answer: GeneratedChoice, start: int, offset: int, with_prompt: bool
    ) -> Payload | None:
        if self.request.logprobs is None or answer.log_probs is None:
            return None
        ids, values = answer.token_ids[start:], list[float | None](answer.log_probs[start:])
        top: list[tuple[list[int], list[float]] | None] = _places(answer.top)[start:]
        if with_prompt and answer.prompt_log_probs is not None:
            ids, values, offset = prompt.ids + ids, [None, *answer.prompt_log_probs, *values], 0
            top = [None, *_places(answer.prompt_top), *top]
        return completion_logprobs(
            self.template, ids, values, offset, self._skips_special, top if self.request.logprobs else None
        )


def _places(top: TopLogProbs | None) -> list[tuple[list[int], list[float]] | None]:
    """Return ids and log-probs of the likeliest tokens, place by place."""
    return [] if top is None else list(zip(top.ids.tolist(), top.log_probs.tolist(), strict=True))
