"""Recursive language models: the model sees a question, and accesses the context only through a Python REPL whose code
can query models (https://arxiv.org/abs/2512.24601)."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.chat_model import ChatModel
from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    MessageType,
    ground_truth_of,
    max_turns_of,
    text_of,
    typed_config,
)
from skyrl_gym.envs.rlm import prompts
from skyrl_gym.envs.rlm.answers import extract_final_variable, extract_last_repl_block, final_text
from skyrl_gym.envs.rlm.examples import examples
from skyrl_gym.envs.rlm.queries import run_queries
from skyrl_gym.envs.rlm.repl import PersistentREPL, REPLResult
from skyrl_gym.error import Error, TaskError
from skyrl_gym.graders import qa, reward_of
from skyrl_gym.services import Retries, Service

DEFAULT_MAX_TURNS = 10


@dataclass
class RLMEnvConfig:
    """Settings of the `rlm` environment."""

    repl_timeout: float = 180.0
    """Time limit of the code of one turn in seconds, including its queries to models. A dataset row's `repl_timeout`
    takes precedence."""

    allow_imports: bool = True
    """Let that code import modules. It is confined by the sandbox in both cases."""

    memory_bytes: int = 1 << 30
    """Memory limit of that code in bytes, including context and variables."""

    base_url: str | None = None
    """Base URL, ending in `/v1`, of an OpenAI-compatible server whose `model` answers `llm_query`, unless an
    `lm_callback` is given. With neither, `llm_query` does not exist."""

    model: str | None = None
    """Name of the model at that server."""

    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's API key; no key is sent if it is not set."""

    max_tokens: int | None = 4096
    """Maximum number of tokens of that model's response. null: the server's default."""

    request_timeout: float = 120.0
    """Timeout of one response, in seconds."""

    retry_seconds: float = 60.0
    """Time in seconds for which a query is retried while the server fails; then the episode fails."""

    ephemeral_turn_prompt: bool = False
    """Remove each turn's prompt from the history once the model has responded to it.

    The list that `init` returned is changed in place, so the driver must build the input of each turn from that list.
    Needs `generator.step_wise_trajectories`, as the history is not append-only."""


class BaseRLMEnv(BaseTextEnv):
    """A question about a context in a REPL. The episode ends with a final answer, or after `max_turns` without one.

    A row gives the context as `extra_info.context_text` (a text that is a JSON object becomes a dict); without it, the
    prompt itself is the context. Further columns are `max_turns` (10) and `repl_timeout`; the caller of `make` may add
    the callables `lm_callback` and `subcall_fn` (see `PersistentREPL`), and `depth`, the number of recursive models
    above this one. Rows without an `lm_callback` use the model of the settings, if they name one.

    A subclass defines the reward (`_get_reward`), and optionally the system prompt (`_get_system_prompt`) and
    additional tools of the REPL (`_get_repl_tools`).
    """

    config_class = RLMEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, Any] | None = None):
        super().__init__()
        self.config = typed_config(RLMEnvConfig, env_config)
        self.extras = extras or {}
        self.max_turns = max_turns_of(self.extras, DEFAULT_MAX_TURNS)
        self.depth: int = self.extras.get("depth", 0)
        self.lm_callback: Callable[[list[str]], list[str]] | None = self.extras.get("lm_callback")
        self._model: ChatModel | None = None
        if self.lm_callback is None and (self.config.base_url or self.config.model):
            self._model = _make_model(self.config)
            self.lm_callback = self._ask_model
        self.repl: PersistentREPL | None = None
        self._context: Any = None
        self._question = ""
        self._messages: ConversationType = []
        self._turn_prompt: MessageType = {}
        self._final_answer: str | None = None
        self._reward = 0.0
        self._done = False

    # What a subclass may define

    def _get_reward(self, final_answer: str) -> float:
        """Compute the reward of the final answer. Here: 1 for any answer that is not empty."""
        return 1.0 if final_answer.strip() else 0.0

    def _get_system_prompt(self) -> str:
        """Return the system prompt; `{custom_tools_section}` in it becomes the description of the tools."""
        queries = prompts.QUERIES_SECTION if self.lm_callback is not None else ""
        return prompts.SYSTEM_PROMPT.replace("{queries_section}", queries)

    def _get_repl_tools(self) -> Mapping[str, object]:
        """Functions and plain values for the REPL: name to value, or to {"tool": value, "description": text}.

        Called when `self._context` is known.
        """
        return {}

    # The episode

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        self._question = "\n\n".join(text_of(message) for message in prompt)
        self._context = self._get_context()
        tools = {name: _split_tool(tool) for name, tool in self._get_repl_tools().items()}
        self.repl = PersistentREPL(
            timeout=self.extras.get("repl_timeout", self.config.repl_timeout),
            custom_tools={name: tool for name, (tool, _) in tools.items()},
            lm_callback=self.lm_callback,
            subcall_fn=self.extras.get("subcall_fn"),
            allow_imports=self.config.allow_imports,
            memory_bytes=self.config.memory_bytes,
        )
        self.repl.add_context(self._context)
        descriptions = {name: description for name, (_, description) in tools.items()}
        self._turn_prompt = self._make_turn_prompt()
        self._messages = [
            {"role": "system", "content": prompts.system_prompt(self._get_system_prompt(), descriptions)},
            {"role": "user", "content": prompts.describe_context(self._context)},
            self._turn_prompt,
        ]
        return self._messages, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self._done:
            return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})
        self.turns += 1
        if self.config.ephemeral_turn_prompt:
            self._remove_turn_prompt()
        code = extract_last_repl_block(action)
        result = self._execute(code) if code is not None else None
        self._final_answer = self._find_final_answer(action, result)
        if self._final_answer is not None:
            self._reward = float(self._get_reward(self._final_answer))
        done = self._done = self._final_answer is not None or self.turns >= self.max_turns
        output = BaseTextEnvStepOutput(
            observations=[] if done else self._make_observations(action, code, result),
            reward=self._reward,
            done=done,
            metadata={},
        )
        if done and self._final_answer is None:
            output["truncated"] = True
        return output

    def close(self) -> None:
        if self.repl is not None:
            self.repl.cleanup()
        if self._model is not None:
            self._model.service.close()

    def get_metrics(self) -> dict[str, object]:
        return {
            "turns_used": self.turns,
            "final_value_set": self._final_answer is not None,
            "final_answer": self._final_answer,
            "reward": self._reward,
        }

    def _get_context(self) -> Any:
        information = self.extras.get("extra_info") or {}
        if not isinstance(information, Mapping):
            raise TaskError(f"extra_info must be a mapping; got {information!r:.200}")
        text = information.get("context_text")
        if text is None:
            return self._question
        if not isinstance(text, str):
            raise TaskError(f"extra_info.context_text must be a string; got {type(text).__name__}")
        return _parse_dict_or_text(text)

    def _ask_model(self, prompts: list[str]) -> list[str]:
        assert self._model is not None and self.repl is not None
        return run_queries(self._model, prompts, self.repl.deadline)

    def _execute(self, code: str) -> REPLResult:
        assert self.repl is not None, "step before init"
        return self.repl.execute(code)

    def _find_final_answer(self, action: str, result: REPLResult | None) -> str | None:
        """Return the answer that the code gave, else the one in the text around it.

        A turn without code may answer as well: a model that knows the answer need not run anything for show.
        """
        if result is not None and result.final_answer is not None:
            return result.final_answer
        name = extract_final_variable(action)
        if name is not None and (answer := self._execute(f"FINAL_VAR({name!r})").final_answer) is not None:
            return answer
        return final_text(action)

    def _make_observations(self, action: str, code: str | None, result: REPLResult | None) -> ConversationType:
        said = []
        if code is not None and result is not None:
            output = "\n".join(part for part in (result.stdout, result.stderr) if part.strip())
            said.append(prompts.observation(code, output, result.locals))
        if (name := extract_final_variable(action)) is not None:
            said.append(prompts.NO_VARIABLE.format(name=name))
        self._turn_prompt = self._make_turn_prompt()
        return [{"role": "user", "content": "\n\n".join(said) or prompts.NO_BLOCK}, self._turn_prompt]

    def _make_turn_prompt(self) -> MessageType:
        return {"role": "user", "content": prompts.format_turn_prompt(self._question, self.turns, self.max_turns)}

    def _remove_turn_prompt(self) -> None:
        """Raises Error if the driver's history is not the list that `init` returned."""
        if not self._messages or self._messages[-1] != self._turn_prompt:
            raise Error(
                "rlm: ephemeral_turn_prompt needs a driver that appends each turn to the list that init returned; "
                "this driver keeps its own history, so disable the setting"
            )
        self._messages.pop()


class RLMEnv(BaseRLMEnv):
    """Pays 1 for an answer that equals one in `reward_spec.ground_truth`, by the rules of question answering, else 0.

    The ground truth is a text, a list of texts, or {"target": either}.
    """

    def __init__(self, env_config: object = None, extras: dict[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = _get_targets(ground_truth_of(self.extras))

    def _get_reward(self, final_answer: str) -> float:
        return reward_of(qa.exact_match(final_answer, self.ground_truth))

    @classmethod
    def examples(cls) -> list[Example]:
        return examples()


def _make_model(config: RLMEnvConfig) -> ChatModel:
    """Raises ValueError if the settings do not name one."""
    if not config.base_url or not config.model:
        raise ValueError(f"rlm: base_url and model must be set together; got {config.base_url!r} and {config.model!r}")
    key = os.environ.get(config.api_key_env)
    retries = Retries(attempts=math.inf, longest_wait=8.0, window=config.retry_seconds)
    service = Service(config.base_url, api_key=key, timeout=config.request_timeout, retries=retries)
    return ChatModel(service, config.model, {} if config.max_tokens is None else {"max_tokens": config.max_tokens})


def _parse_dict_or_text(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _split_tool(tool: object) -> tuple[object, str | None]:
    if isinstance(tool, Mapping) and "tool" in tool:
        return tool["tool"], tool.get("description")
    return tool, None


def _get_targets(ground_truth: Any) -> list[str]:
    """Raises TaskError unless there is at least one text."""
    target = ground_truth["target"] if isinstance(ground_truth, Mapping) and "target" in ground_truth else ground_truth
    try:
        return qa.as_list(target)
    except (TypeError, ValueError) as failure:
        rule = "a string or list of strings, optionally under 'target'"
        raise TaskError(f"reward_spec.ground_truth must be {rule}; got {ground_truth!r:.200}") from failure
