"""Procedural reasoning tasks: every generator of the reasoning-gym package as a single-turn environment."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    mapping_of,
    required,
    typed_config,
    whole_number,
)
from skyrl_gym.envs.reasoning_gym.grading import FULL_SCORE, grade
from skyrl_gym.envs.reasoning_gym.library import (
    Entry,
    EntryRequest,
    check_config,
    check_entry,
    check_name,
    find_system_prompt,
    generate,
    get_oracle_answer,
)
from skyrl_gym.envs.reasoning_gym.rows import reasoning_gym_rows
from skyrl_gym.error import TaskError
from skyrl_gym.graders.results import Invalid, Score, reward_of


@dataclass
class ReasoningGymConfig:
    """Settings of `environment.skyrl_gym.reasoning_gym`."""

    strict: bool = False
    """Give reward 1 to a solved task and 0 to all else. Otherwise the reward is the generator's score, often 0.01 to
    0.5 for a well-formed wrong answer."""

    system_prompt: str | None = None
    """System message for prompts that have none: a text, or the name of one of reasoning-gym's own (`default`,
    `DeepSeekZero`, `simple`, `direct`, `chain_of_draft`)."""


class ReasoningGymEnv(BaseTextEnv):
    """Single-turn question; the last `<answer>...</answer>` is graded by the question's generator.

    The dataset row contains `dataset` (the generator), `dataset_config` (its settings: a mapping or JSON text), and
    either an `entry` (question, answer, metadata: a mapping or JSON text) or `seed` and `index` (default 0), from which
    the entry is regenerated. An empty prompt is replaced by the question.
    """

    config_class = ReasoningGymConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        extras = extras or {}
        self.config = typed_config(ReasoningGymConfig, env_config)
        carried = extras.get("entry")
        self.dataset = check_name(_get_dataset_name(extras, carried))
        self.dataset_config = check_config(self.dataset, extras.get("dataset_config"))
        if carried is not None:
            self.entry = check_entry(self.dataset, carried)
        else:
            required(extras, "seed")
            seed, index = (whole_number(extras, name, 0) for name in ("seed", "index"))
            self._request = EntryRequest(self.dataset, seed, index, self.dataset_config)
        self.is_ready_made = carried is not None
        self.score = 0.0
        self.answered = False

    @functools.cached_property
    def entry(self) -> Entry:
        """Question, answer and metadata. Making it can take seconds, so it is not done in the constructor."""
        return generate([self._request])[0]

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        """Raises TaskError if the prompt asks something else than the question that the row's seed makes."""
        question = self.entry["question"]
        messages = list(prompt) or [{"role": "user", "content": question}]
        if not self.is_ready_made and not any(question in str(message.get("content")) for message in messages):
            raise TaskError(
                f"prompt does not contain the question that {self.dataset} generates from seed and index: "
                f"{question!r:.200}; write the entry into the row, as reasoning_gym_rows does"
            )
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": find_system_prompt(self.config.system_prompt)})
        return messages, {"dataset": self.dataset}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        result = grade(self.dataset, self.dataset_config, self.entry, action)
        self.score = reward_of(result)
        self.answered = isinstance(result, Score)
        metadata: dict[str, object] = {"dataset": self.dataset, "score": self.score}
        match result:
            case Score(prediction=prediction):
                metadata["parsed_answer"] = prediction
            case Invalid(reason=reason):
                metadata["invalid"] = reason
        reward = self.outcome_reward if self.config.strict else self.score
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)

    @property
    def outcome_reward(self) -> float:
        """1 if the task is solved, else 0."""
        return float(self.score >= FULL_SCORE)

    def get_metrics(self) -> dict[str, object]:
        return {
            "outcome_reward": self.outcome_reward,
            "score": self.score,
            "answered": self.answered,
            f"solved/{self.dataset}": self.outcome_reward,
        }

    @classmethod
    def examples(cls) -> list[Example]:
        """Raises Error if reasoning-gym is not installed."""
        sources = ["chain_sum", "caesar_cipher", "word_sorting", "spiral_matrix", "time_intervals"]
        return [cls._make_example(row) for row in reasoning_gym_rows(sources, size=2 * len(sources), seed=5)]

    @staticmethod
    def _make_example(row: dict[str, Any]) -> Example:
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        answer = get_oracle_answer(check_entry(row["dataset"], row["entry"]))
        return Example(prompt=row["prompt"], extras=extras, oracle=[f"<answer>{answer}</answer>"])


def _get_dataset_name(extras: Mapping[str, object], entry: object) -> str:
    if extras.get("dataset") is None and entry is not None:
        metadata = mapping_of("entry", entry).get("metadata")
        if isinstance(metadata, Mapping) and metadata.get("source_dataset"):
            return str(metadata["source_dataset"])
    return str(required(extras, "dataset"))
