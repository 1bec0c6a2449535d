"""Step-wise dialogue: every turn of a conversation is a training sample. Independent of engines."""

from collections.abc import Callable
from dataclasses import replace

from skyrl_train.generators.dialogue import ConversationDialogue, Dialogue
from skyrl_train.generators.environment import StepResult
from skyrl_train.generators.tokenization import ChatFormat
from skyrl_train.inference_engines.request import Completion
from skyrl_train.rollouts.types import TrainingSample
from skyrl_train.types import ConversationType


class StepWiseDialogue(Dialogue):
    """Conversation with one sample per turn: its prompt is the input of that turn, its response the completion (and the
    closing token, if the model did not generate it). Ids and log-probs therefore are the engine's, however the history
    changes afterwards: a chat template may drop earlier thoughts, an environment may remove messages.

    Args:
        new_turn: creates the dialogue of one turn.
        renders_anew: render every prompt from the messages, as required by templates that rewrite earlier turns.
            Otherwise tokens are only appended, unless the environment removed messages from the list that its `init`
            returned: then the next prompt is rendered from the remaining messages.
    """

    def __init__(self, chat: ChatFormat, new_turn: Callable[[], ConversationDialogue], renders_anew: bool) -> None:
        super().__init__(chat)
        self._new_turn = new_turn
        self._renders_anew = renders_anew
        self._messages: ConversationType = []
        self._num_messages = 0
        self._completed: list[ConversationDialogue] = []
        self._current = new_turn()

    def open(self, history: ConversationType) -> None:
        self._messages = history  # not copied: an environment may modify the list that it returned
        self._num_messages = len(history)
        self._current.open(history)

    def get_input_ids(self) -> list[int]:
        return self._current.get_input_ids()

    def add_completion(self, completion: Completion) -> None:
        self._current.add_completion(completion)
        self._completed.append(self._current)

    def add_step(self, completion: Completion, step: StepResult) -> None:
        turn = self._current
        anew = self._renders_anew or len(self._messages) < self._num_messages
        turn.add_step(completion, replace(step, done=step.done or anew))
        text = step.postprocessed_action
        if text is None:
            text = self.chat.turn_ends.strip(completion.text)
        self._messages += [{"role": "assistant", "content": text}, *step.observations]
        self._num_messages = len(self._messages)
        if not step.done:
            self._current = self._new_turn()
            self._current.prompt_ids = self._get_prompt_ids() if anew else turn.get_input_ids()

    def finish(self, stop_reason: str) -> list[TrainingSample]:
        return [sample for turn in self._get_completed_turns() for sample in turn.finish(stop_reason)]

    def to_failed_samples(self) -> list[TrainingSample]:
        return [sample for turn in self._get_completed_turns() for sample in turn.to_failed_samples()]

    def _get_completed_turns(self) -> list[ConversationDialogue]:
        """Return the turns with a completion, or the first turn if no turn has one."""
        return self._completed or [self._current]

    def _get_prompt_ids(self) -> list[int]:
        return self.chat.ids(self._messages, add_generation_prompt=True)
