"""An environment on an OpenEnv server as a text environment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    mapping_of,
    max_turns_of,
    typed_config,
    whole_number,
    with_user_text,
)
from skyrl_gym.error import InfraError, TaskError
from skyrl_gym.hubs.openenv.client import Payload, Refused, Session
from skyrl_gym.services import origin_of
from skyrl_gym.tags import last_tagged

TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action's schema at servers whose actions are calls of MCP tools."""
TOOL_SCHEMA = {
    "title": "Call of a tool",
    "required": ["tool_name", "arguments"],
    "properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}},
}


@dataclass
class OpenEnvConfig:
    """Settings of `+environment.skyrl_gym.OpenEnv`. `base_url` and `max_turns` of a dataset row take precedence."""

    base_url: str = ""
    """Address of the server, as `http://host:port`."""

    api_key: str | None = None
    """Sent as a bearer token, to the server of `base_url` alone, which is needed then."""

    max_turns: int = 20
    """Maximum number of turns; servers have no limit that they tell of."""

    timeout: float = 120.0
    """Seconds for each answer of the server, and for a free place on it."""

    describe: bool = True
    """Add the JSON schema of actions, and the form of a turn, to the first message."""

    def __post_init__(self) -> None:
        if self.api_key and not self.base_url:
            raise ValueError(
                "api_key needs base_url, the server that it belongs to: it is never sent to a server that only a "
                "dataset row names"
            )


class OpenEnv(BaseTextEnv):
    """The last `<action>...</action>` of each turn is the action: a JSON object as the server's schema asks, or, if the
    schema has one required field, that field's text.

    The dataset row may give `base_url`, `reset` (arguments of the server's reset: a mapping or its JSON text), `seed`
    and `max_turns`. An action that the server refuses is answered with its reason; it costs a turn. A server that is
    unavailable, full or broken is an InfraError.
    """

    config_class = OpenEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self.config = typed_config(OpenEnvConfig, env_config)
        self.base_url = str(extras.get("base_url") or self.config.base_url)
        if not self.base_url:
            raise TaskError("base_url must be the address of an OpenEnv server, in the row or the settings; got none")
        own = self.config.base_url
        if self.config.api_key and origin_of(self.base_url) != origin_of(own):
            raise TaskError(
                f"api_key is sent only to {own}, but the row has the base_url {self.base_url!r}; "
                "correct the row, or remove api_key"
            )
        given = mapping_of("reset", extras.get("reset"))
        self.reset = {name: value for name, value in given.items() if value is not None}
        seed = whole_number(extras, "seed", None)
        if seed is not None:
            self.reset["seed"] = seed
        self.max_turns = max_turns_of(extras, self.config.max_turns)
        self.session: Session | None = None
        self.schema: Payload = {}
        self.takes_tools = False
        self.episode_return = 0.0
        self.refused_actions = 0

    def init(self, prompt: ConversationType, seed: int | None = None) -> tuple[ConversationType, dict[str, object]]:
        """Begin the episode, and add the first observation to the prompt. Raises InfraError."""
        self.session = Session(self.base_url, self.config.timeout, self.config.api_key)
        if seed is not None:
            self.reset.setdefault("seed", seed)
        first = self.session.reset(self.reset)
        self.schema = self.session.schema()["action"]
        self.takes_tools = self.schema.get("title") in TOOL_ACTIONS
        parts = [self._description()] if self.config.describe else []
        return with_user_text(prompt, "\n\n".join([*parts, _format_observation(first)])), {}

    def _description(self) -> str:
        schema = {name: part for name, part in self.schema.items() if name in ("properties", "required", "$defs")}
        schema.get("properties", {}).pop("metadata", None)
        text = f"Actions are JSON objects of this schema:\n{json.dumps(schema)}"
        if self.takes_tools:
            assert self.session is not None
            try:
                answer = self.session.step({"type": "list_tools"})
            except Refused as refusal:
                raise InfraError(f"{self.base_url} does not list its tools: {refusal}") from None
            tools = "\n".join(json.dumps(tool) for tool in answer["observation"].get("tools", []))
            self.schema = TOOL_SCHEMA
            form = json.dumps(TOOL_SCHEMA)
            text = f"Actions are calls of these tools:\n{tools}\nby JSON objects of this schema:\n{form}"
        end = f"\nAct by writing <action>your action</action>. There are {self.max_turns} turns."
        field = self._only_field()
        return f"{text}{end} The text of {field} alone will do." if field else text + end

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Raises InfraError."""
        self.turns += 1
        assert self.session is not None, "call init before step"
        last = self.turns >= self.max_turns
        try:
            answer = self.session.step(self._action(action))
        except Refused as refusal:
            self.refused_actions += 1
            text = f"The action was refused: {refusal}"
            return self._output(0.0, last, last, text, {"refused": str(refusal)})
        reward = answer.get("reward")
        reward = 0.0 if reward is None else float(reward)
        self.episode_return += reward
        done = bool(answer.get("done"))
        return self._output(reward, done or last, last and not done, _format_observation(answer), {})

    def _output(
        self, reward: float, done: bool, truncated: bool, text: str, metadata: dict[str, object]
    ) -> BaseTextEnvStepOutput:
        left = self.max_turns - self.turns
        reply = {"role": "user", "content": f"{text}\n{left} turn{'' if left == 1 else 's'} left."}
        output = BaseTextEnvStepOutput(
            observations=[] if done else [reply], reward=reward, done=done, metadata=metadata
        )
        if truncated:
            output["truncated"] = True
        return output

    def _action(self, text: str) -> Payload:
        """Return the action in a turn. Raises Refused, with the rule."""
        written = last_tagged(text, "action")
        if written is None:
            raise Refused("there is no <action>...</action> in what you wrote")
        written = written.strip()
        try:
            action = json.loads(written)
        except (ValueError, RecursionError):
            action = written
        if not isinstance(action, Mapping):
            field = self._only_field()
            if field is None:
                raise Refused(f"it must be a JSON object; got {written!r:.200}")
            is_text = self.schema["properties"].get(field, {}).get("type") == "string"
            action = {field: written if is_text else action}
        return {"type": "call_tool", **action} if self.takes_tools else dict(action)

    def _only_field(self) -> str | None:
        required = self.schema.get("required", [])
        return required[0] if len(required) == 1 else None

    def get_metrics(self) -> dict[str, object]:
        return {
            "outcome_reward": self.episode_return,
            "turns": self.turns,
            "refused_actions": self.refused_actions,
        }

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def _format_observation(answer: Payload) -> str:
    """Return an observation's fields as text: JSON, or the text itself where it is the only field."""
    observation = answer.get("observation")
    if not isinstance(observation, Mapping):
        raise InfraError(f"an OpenEnv server returned no observation: {answer!r:.200}")
    fields = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    only = next(iter(fields.values())) if len(fields) == 1 else None
    return f"Observation:\n{only if isinstance(only, str) else json.dumps(fields, ensure_ascii=False)}"
