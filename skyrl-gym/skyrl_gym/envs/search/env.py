"""Question answering with a search engine, as in Search-R1 (https://arxiv.org/abs/2503.09516)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    ground_truth_of,
    max_turns_of,
    typed_config,
)
from skyrl_gym.envs.search.examples import make_examples
from skyrl_gym.error import TaskError
from skyrl_gym.graders import qa
from skyrl_gym.graders.results import reward_of
from skyrl_gym.tags import first_tagged, has_tags
from skyrl_gym.tools.search import SearchSettings

DEFAULT_MAX_TURNS = 2


@dataclass
class SearchEnvConfig(SearchSettings):
    """Settings of the `search` environment."""


class SearchEnv(BaseTextEnv):
    """Question answering with search. `<search>query</search>` returns a user message with documents in `<information>`
    tags; an `<answer>` ends the episode: reward 1 if it matches an accepted answer after normalization, else 0.

    The last of `max_turns` turns (from the extras, default 2) ends the episode in any case. Only the model's text is
    graded: an answer in a document earns nothing. An unavailable server raises `InfraError`.
    """

    config_class = SearchEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None) -> None:
        super().__init__()
        config = typed_config(SearchEnvConfig, env_config)
        extras = extras or {}
        self.ground_truth = ground_truth_of(extras)
        self.targets = _get_accepted_answers(self.ground_truth)
        self.max_turns = max_turns_of(extras, DEFAULT_MAX_TURNS)
        self.num_searches = 0
        self.chat_history: ConversationType = []
        """Messages of this episode after the prompt."""
        self.tool_group = config.tool_group()
        self.init_tool_groups([self.tool_group])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self._is_done(action):
            return BaseTextEnvStepOutput(
                observations=[],
                reward=self._get_reward(),
                done=True,
                metadata={},
                truncated=not has_tags(action, "answer"),
            )
        query = self._parse_action(action)
        observation = {"role": "user", "content": self._search(query)}
        self.chat_history.append(observation)
        metadata = {"tool_group": self.tool_group.name, "tool_name": "search", "tool_input": query}
        return BaseTextEnvStepOutput(observations=[observation], reward=0.0, done=False, metadata=metadata)

    def _parse_action(self, action: str) -> list[str | None]:
        """Return the arguments of the tool: the first query, with the space around it, or None."""
        return [first_tagged(action, "search")]

    def _is_done(self, action: str) -> bool:
        return self.turns >= self.max_turns or has_tags(action, "answer")

    def _search(self, query: list[str | None]) -> str:
        self.num_searches += query != [None]
        return self._observe_tool(self.tool_group.name, "search", query)

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[object]) -> str:
        output = super()._execute_tool(tool_group_name, tool_name, tool_input)
        return f"\n<information>{output}</information>\n"

    def _get_reward(self) -> float:
        written = "".join(message["content"] for message in self.chat_history if message["role"] == "assistant")
        return reward_of(qa.exact_match(qa.extract_solution(written), self.targets))

    def get_metrics(self) -> dict[str, object]:
        return {"turns": self.turns, "searches": self.num_searches}

    @classmethod
    def examples(cls) -> list[Example]:
        """Return examples that need a retrieval server over `skyrl_gym.envs.search.examples.EXAMPLE_DOCUMENTS`."""
        return make_examples()


def _get_accepted_answers(ground_truth: object) -> list[str]:
    """`target` of a row's ground truth: a text, or several (a list, or an array as parquet readers give)."""
    rule = "reward_spec.ground_truth must be {'target': an answer, or a list of answers that are accepted}"
    if not isinstance(ground_truth, Mapping) or ground_truth.get("target") is None:
        raise TaskError(f"{rule}; got {ground_truth!r:.200}")
    target = ground_truth["target"]
    answers = [target] if isinstance(target, str) else list(target) if hasattr(target, "__iter__") else []
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise TaskError(f"{rule}; target is {target!r:.200}")
    return [str(answer) for answer in answers]
