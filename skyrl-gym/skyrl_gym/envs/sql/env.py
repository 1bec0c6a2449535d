"""Questions to a database, answered by a SQL query, as in SkyRL-SQL: the model may try queries before it settles."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    ground_truth_of,
    max_turns_of,
    required,
    typed_config,
)
from skyrl_gym.error import TaskError
from skyrl_gym.graders.results import reward_of
from skyrl_gym.graders.sql import Rule, grade_sql, has_order, verify_format_and_extract
from skyrl_gym.tags import has_tags
from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup, database_file

DEFAULT_MAX_TURNS = 5
INVALID_FORMAT_REWARD = -1.0

DATABASE_FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "spider_test": "spider/test_database",
    "spider_dk": "Spider-DK/database",
    "bird": "bird/train/train_databases",
}
"""Folder of the databases of each dataset, below `db_path`."""


@dataclass
class Text2SQLEnvConfig:
    """Settings of the `text2sql` environment."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder with the databases: `spider/database/<db_id>/<db_id>.sqlite` and so on."""
    rule: Rule = "skyrl"
    """Rule for the equality of two results. `skyrl`: the same set of rows; the order of columns counts. `spider`: the
    same multiset of rows, with columns in any order, and in the gold query's row order if it has an ORDER BY."""
    compare_order: bool = False
    """Require the gold query's order and number of rows if that query has an ORDER BY. Only with rule=skyrl."""

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"text2sql.rule must be one of {', '.join(get_args(Rule))}; got {self.rule!r}")
        if self.compare_order and self.rule == "spider":
            raise ValueError(
                "text2sql.compare_order is supported only by text2sql.rule=skyrl; rule=spider compares the order of "
                "rows if the gold query has an ORDER BY: remove compare_order"
            )


class SQLEnv(BaseTextEnv):
    """`<sql>query</sql>` is answered by a user message with the rows in an `<observation>`; a
    `<solution>query</solution>` ends the episode. 1 if it gives the rows of the gold query (see `rule`), else 0; -1 if
    the episode is not of the asked form (`skyrl_gym.graders.sql.verify_format_and_extract`), for one because it has no
    solution.

    The last of `max_turns` turns (from the extras, else 5) ends the episode in any case. Only what the model itself
    wrote is graded: of observations, the form check sees that they were there.

    A dataset row has `db_id`, `data` (one of `DATABASE_FOLDERS`) and `reward_spec.ground_truth`, the gold query. One
    that gives no rows makes a poor task: every query that finds nothing solves it.
    """

    config_class = Text2SQLEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        config = typed_config(Text2SQLEnvConfig, env_config)
        extras = extras or {}
        self.db_id: str = required(extras, "db_id")
        self.gold_sql: str = _get_query(ground_truth_of(extras))
        self.task: str = required(extras, "data")
        self.max_turns = max_turns_of(extras, DEFAULT_MAX_TURNS)
        folder = str(Path(config.db_path) / _get_folder(self.task))
        self.db_file = _find_database(folder, self.db_id)
        self.rule: Rule = config.rule
        self.ordered = config.compare_order and has_order(self.gold_sql)
        self.outcome_reward = 0.0
        self.solved = False
        self.valid_format = False
        self.chat_history: ConversationType = []
        """Messages of this episode after the prompt."""
        self.tool_group = SQLCodeExecutorToolGroup(db_file_path=folder)
        self.init_tool_groups([self.tool_group])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        self.solved = self.solved or has_tags(action, "solution")
        if self.solved or self._is_done(action):
            return BaseTextEnvStepOutput(
                observations=[], reward=self._get_reward(), done=True, metadata={}, truncated=not self.solved
            )
        tool_group, tool_name, tool_input = self._parse_action(action)
        observation = {"role": "user", "content": self._observe_tool(tool_group, tool_name, tool_input)}
        self.chat_history.append(observation)
        metadata = {"tool_group": tool_group, "tool_name": tool_name, "tool_input": tool_input}
        return BaseTextEnvStepOutput(observations=[observation], reward=0.0, done=False, metadata=metadata)

    def _parse_action(self, action: str) -> tuple[str, str, tuple[str, str | None, int]]:
        """Group, tool and its arguments: the first query, or None."""
        query, end, _ = action.partition("<sql>")[2].partition("</sql>")
        return self.tool_group.name, "sql", (self.db_id, query if end else None, self.max_turns - self.turns)

    def _is_done(self, action: str) -> bool:
        return self.turns >= self.max_turns or has_tags(action, "solution")

    def _get_reward(self) -> float:
        self.valid_format, _, solution, _ = verify_format_and_extract(self._join_model_text())
        if solution is None:
            return INVALID_FORMAT_REWARD
        grade = grade_sql(solution, self.gold_sql, self.db_file, rule=self.rule, ordered=self.ordered)
        self.outcome_reward = reward_of(grade)
        return self.outcome_reward

    def _join_model_text(self) -> str:
        """Return the episode without the content of observations, which may hold tags from the database."""
        return "".join(
            message["content"] if message["role"] == "assistant" else "<observation></observation>"
            for message in self.chat_history
        )

    def get_metrics(self) -> dict[str, object]:
        return {"turns": self.turns, "valid_format": self.valid_format, "outcome_reward": self.outcome_reward}

    @classmethod
    def examples(cls) -> list[Example]:
        from skyrl_gym.envs.sql.examples import make_examples

        return make_examples()


def _get_query(ground_truth: object) -> str:
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise TaskError(f"reward_spec.ground_truth must be a SQL query; got {ground_truth!r:.200}")
    return ground_truth


def _get_folder(data: str) -> str:
    if not isinstance(data, str) or data not in DATABASE_FOLDERS:
        raise TaskError(f"data must be one of {', '.join(DATABASE_FOLDERS)}; got {data!r:.100}")
    return DATABASE_FOLDERS[data]


def _find_database(folder: str, db_id: str) -> str:
    try:
        db_file = database_file(folder, db_id)
    except ValueError as failure:
        raise TaskError(str(failure)) from failure
    if not os.path.exists(db_file):
        raise FileNotFoundError(
            f"no database at {db_file}; environment.skyrl_gym.text2sql.db_path must be the parent folder"
        )
    return db_file
