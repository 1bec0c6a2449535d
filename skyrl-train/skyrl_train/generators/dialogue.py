"""Dialogues: tokens of a trajectory while it grows, and which of them the model generated. Knows no engine.

Each way to tokenize a conversation is a class with the same few methods.
"""

import functools
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, field

from loguru import logger

from skyrl_train.errors import RolloutError
from skyrl_train.expert_routes import ExpertRoutes, join_routes
from skyrl_train.generators.environment import StepResult
from skyrl_train.generators.rewards import TurnReward, token_rewards
from skyrl_train.generators.tokenization import ChatFormat
from skyrl_train.inference_engines.request import Completion
from skyrl_train.kept_tokens import KeptTokens, join_kept_tokens
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample
from skyrl_train.types import ConversationType


@dataclass
class ResponseTokens:
    """Tokens after the prompt; lists of one length."""

    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    kept: KeptTokens = field(default_factory=lambda: KeptTokens.whole_vocabulary(0))

    def __len__(self) -> int:
        return len(self.ids)

    def append_generated(
        self,
        ids: list[int],
        logprobs: list[float] | None,
        weight_versions: list[int],
        kept: KeptTokens | None = None,
    ) -> None:
        """Append tokens of the model."""
        self.ids += ids
        self.loss_mask += [1] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.weight_versions += weight_versions
        self._append_kept(kept or KeptTokens.whole_vocabulary(len(ids)))

    def append_context(self, ids: list[int]) -> None:
        """Append tokens of the environment, of the template, or of ours."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.weight_versions += [NO_VERSION] * len(ids)
        self._append_kept(KeptTokens.whole_vocabulary(len(ids)))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for tokens in (self.ids, self.loss_mask, self.logprobs, self.weight_versions):
            del tokens[length:]
        self.kept = self.kept.first(length)

    def _append_kept(self, kept: KeptTokens) -> None:
        self.kept = join_kept_tokens([self.kept, kept])

    def as_sample(
        self, prompt_ids: list[int], turn_rewards: list[TurnReward], routes: ExpertRoutes | None = None
    ) -> TrainingSample:
        """Return the training sample of this response to a prompt. There is at least one token."""
        return TrainingSample(
            prompt_ids=prompt_ids,
            response_ids=self.ids,
            loss_mask=self.loss_mask,
            rewards=token_rewards(len(self), turn_rewards),
            log_probs=self.logprobs,
            weight_versions=self.weight_versions,
            routes=routes,
            kept_tokens=self.kept if len(self.kept.ids) else None,
        )


class Dialogue(ABC):
    """Tokens of one conversation. Call `open` first, then `add_completion` and `add_step` in turn, then `finish`."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.prompt_ids: list[int] = []

    @abstractmethod
    def open(self, history: ConversationType) -> None:
        """Add the messages before the first completion."""

    @abstractmethod
    def input_ids(self) -> list[int]:
        """Return the input of the next completion."""

    @abstractmethod
    def add_completion(self, completion: Completion) -> None:
        """Add the completion of a turn."""

    @abstractmethod
    def add_step(self, completion: Completion, step: StepResult) -> None:
        """Add the environment's step on that completion."""

    @abstractmethod
    def finish(self, stop_reason: str) -> list[TrainingSample]:
        """Return the training samples, at least one: the tokens up to the last completion (the model read no later
        observation), or one sample a turn."""

    def to_failed_samples(self) -> list[TrainingSample]:
        """Return the tokens so far of a trajectory that failed: nothing of it trains, no token has a reward."""
        response = self._partial_response()
        if not response.ids:
            response.append_context(self.chat.closing_ids)
        response.loss_mask = [0] * len(response)
        return [response.as_sample(self.prompt_ids, [])]

    def _partial_response(self) -> ResponseTokens:
        return ResponseTokens()


class TokenDialogue(Dialogue):
    """Base of dialogues that only append tokens: generated tokens are never encoded again."""

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(chat)
        self.response = ResponseTokens()
        self.turn_rewards: list[TurnReward] = []
        self._routes: ExpertRoutes | None = None
        self._turn_start = 0
        self._turn_end = 0

    def open(self, history: ConversationType) -> None:
        self.prompt_ids = self.chat.ids(history, add_generation_prompt=True)

    def input_ids(self) -> list[int]:
        return self.prompt_ids + self.response.ids

    def add_completion(self, completion: Completion) -> None:
        self._turn_start = len(self.response)
        self.response.append_generated(
            completion.token_ids, completion.log_probs, completion.weight_versions, completion.kept_tokens
        )
        self._turn_end = len(self.response)
        # The turn's prompt holds all that came before: its routes are those of observations and of the last token of
        # the turn before, which had none yet.
        self._routes = join_routes([self._routes, completion.routes])

    def finish(self, stop_reason: str) -> list[TrainingSample]:
        self._truncate(self._turn_end)
        if not self.response.ids:
            self.response.append_context(self.chat.closing_ids)
        return [self.response.as_sample(self.prompt_ids, self.turn_rewards, self._routes)]

    def _partial_response(self) -> ResponseTokens:
        self._truncate(self._turn_end)
        return self.response

    def _truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the response, and their routes."""
        self.response.truncate(length)
        if self._routes is not None:
            self._routes = self._routes.first(len(self.prompt_ids) + length)

    def _replace_answer(self, completion: Completion, text: str) -> None:
        """Replace a completion by an environment's `postprocessed_action`.

        Where the text is a beginning of the completion and ends between two tokens, those tokens are kept. Otherwise
        the text is encoded, with loss mask 0: the model did not generate its tokens.
        """
        if text == completion.text:
            return
        kept = self._tokens_of_beginning(completion, text)
        self._truncate(self._turn_start + (kept or 0))
        if kept is None:
            _warn_of_encoded_action()
            self.response.append_context(self.chat.encode(text))
        self._turn_end = len(self.response)

    def _tokens_of_beginning(self, completion: Completion, text: str) -> int | None:
        if not completion.text.startswith(text):
            return None
        ids = completion.token_ids
        length = bisect_left(range(len(ids) + 1), len(text), key=lambda n: len(self.chat.decode(ids[:n])))
        return length if self.chat.decode(ids[:length]) == text else None

    def _last_generated_token(self) -> int:
        """Return the index of the turn's last generated token; if there is none, of the turn's last token."""
        for index in range(self._turn_end - 1, self._turn_start - 1, -1):
            if self.response.loss_mask[index]:
                return index
        return self._turn_end - 1


class ConversationDialogue(TokenDialogue):
    """Conversation with one message a turn, and observations between them in the template's format.

    Args:
        append_eos_after_stop_string: an answer that ended with one of `stop_strings` is closed with the end of a turn,
            which the model did not write (loss mask 0).
    """

    def __init__(self, chat: ChatFormat, stop_strings: list[str], append_eos_after_stop_string: bool) -> None:
        super().__init__(chat)
        self.stop_strings = tuple(stop_strings) if append_eos_after_stop_string else ()

    def add_step(self, completion: Completion, step: StepResult) -> None:
        if step.postprocessed_action is not None:
            self._replace_answer(completion, step.postprocessed_action)
        text = completion.text if step.postprocessed_action is None else step.postprocessed_action
        self.turn_rewards.append(TurnReward(self._last_generated_token(), step.reward))
        if self.stop_strings and text.endswith(self.stop_strings) and not self._is_closed(text):
            self.response.append_context(self.chat.closing_ids)
            self._turn_end = len(self.response)
            text += self.chat.turn_ends.closing
        if not step.done:
            # An answer that was cut short still has to be closed before the next message opens.
            cut_short = completion.stop_reason == "length" or step.postprocessed_action is not None
            closed = self._is_closed(text) or not cut_short
            last_id = self.response.ids[-1] if self.response.ids else None
            self.response.append_context(
                self.chat.continuation_ids(step.observations, answer_is_closed=closed, last_id=last_id)
            )

    def _is_closed(self, text: str) -> bool:
        ends = self.chat.turn_ends
        closed_by_text = bool(ends.closing) and text.rstrip().endswith(ends.closing)
        return closed_by_text or ends.are_in(self.response.ids[self._turn_start : self._turn_end])


class SingleMessageDialogue(TokenDialogue):
    """Single assistant message that grows: observations stand inside it as plain text, such as a tool's result between
    tags."""

    def add_step(self, completion: Completion, step: StepResult) -> None:
        if step.postprocessed_action is not None:
            self._replace_answer(completion, step.postprocessed_action)
        if not step.done:
            self._drop_end()
        self.turn_rewards.append(TurnReward(self._last_generated_token(), step.reward))
        if not step.done:
            for message in step.observations:
                self.response.append_context(self.chat.encode(message["content"]))

    def finish(self, stop_reason: str) -> list[TrainingSample]:
        """Close the message if it came to its end; tokens of ours get loss mask 0."""
        self.response.truncate(self._turn_end)
        if stop_reason != "length" and not self.chat.turn_ends.are_in(self.response.ids):
            self.response.append_context(self.chat.closing_ids)
            self._turn_end = len(self.response)
        return super().finish(stop_reason)

    def _drop_end(self) -> None:
        """Remove the end of the turn: the message continues."""
        if self.chat.turn_ends.are_in(self.response.ids[self._turn_start : self._turn_end]):
            self._truncate(self._turn_end - 1)
            self._turn_end -= 1


class RetokenizedDialogue(Dialogue):
    """The whole conversation is rendered anew each turn, as a chat template that rewrites earlier turns (dropping their
    thoughts, for example) demands. The template says which tokens are the model's: it needs `generation` blocks.

    The ids may differ from those that the model wrote, so there are no log-probs.
    """

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(chat)
        self.messages: ConversationType = []
        self.turns: list[tuple[Completion, float]] = []
        self._num_messages = 0

    def open(self, history: ConversationType) -> None:
        self.messages = list(history)
        self._num_messages = len(history)
        self.prompt_ids = self.chat.ids(history)

    def input_ids(self) -> list[int]:
        return self.chat.ids(self.messages, add_generation_prompt=True)

    def add_completion(self, completion: Completion) -> None:
        text = self.chat.turn_ends.strip(completion.text)
        self.messages.append({"role": "assistant", "content": text})
        self._num_messages = len(self.messages)
        self.turns.append((completion, 0.0))

    def add_step(self, completion: Completion, step: StepResult) -> None:
        if step.postprocessed_action is not None:
            self.messages[-1] = {"role": "assistant", "content": step.postprocessed_action}
        self.turns[-1] = (completion, step.reward)
        self.messages += step.observations

    def finish(self, stop_reason: str) -> list[TrainingSample]:
        response, turn_rewards = ResponseTokens(), []
        if self.turns:
            ids, assistant_mask = self._rendered()
            response.append_context(ids)
            turn_rewards = self._mark_answers(response, assistant_mask)
        else:
            response.append_context(self.chat.closing_ids)
        return [response.as_sample(self.prompt_ids, turn_rewards)]

    def _rendered(self) -> tuple[list[int], list[int]]:
        """Return ids and assistant mask of everything after the prompt."""
        ids, mask = self.chat.ids_and_written_mask(self.messages[: self._num_messages])
        if ids[: len(self.prompt_ids)] != self.prompt_ids:
            raise RolloutError(
                "environment", "the chat template rewrote the prompt when an answer followed it; use another template"
            )
        return ids[len(self.prompt_ids) :], mask[len(self.prompt_ids) :]

    def _mark_answers(self, response: ResponseTokens, assistant_mask: list[int]) -> list[TurnReward]:
        """Set loss mask and weight versions of every completion; return their rewards."""
        spans = _runs_of_ones(assistant_mask)
        if len(spans) != len(self.turns):
            raise RolloutError(
                "environment",
                f"the chat template marks {len(spans)} answers where the model wrote {len(self.turns)}; "
                "it must put each in a generation block",
            )
        turn_rewards = []
        for (start, end), (completion, reward) in zip(spans, self.turns, strict=True):
            ends = self.chat.turn_ends
            # The template closes every message; where the model did not, that token is not its own.
            wrote_end = ends.are_in(completion.token_ids)
            written_end = end - 1 if ends.are_in(response.ids[:end]) and not wrote_end else end
            num_written = written_end - start
            version = completion.weight_versions[-1] if completion.weight_versions else NO_VERSION
            response.loss_mask[start:written_end] = [1] * num_written
            response.weight_versions[start:written_end] = [version] * num_written
            turn_rewards.append(TurnReward(max(written_end, start + 1) - 1, reward))
        return turn_rewards


def _runs_of_ones(mask: list[int]) -> list[tuple[int, int]]:
    """Return start and end of every run of ones."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


@functools.cache
def _warn_of_encoded_action() -> None:
    """Log a warning, once in a process."""
    logger.warning(
        "an environment replaced the model's text by a postprocessed_action that is not a beginning of it: the model "
        "is not trained on those tokens (loss mask 0). Let the environment end its turn with a stop string instead."
    )
