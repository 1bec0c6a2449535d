"""Any environment of the verifiers package as a text environment."""

import json
from dataclasses import dataclass
from typing import Any

from skyrl_gym.chat.tool_formats import TOOL_FORMATS, Invalid
from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    MessageType,
    required,
    text_of,
    typed_config,
    whole_number,
)
from skyrl_gym.error import Error, InfraError, TaskError
from skyrl_gym.hubs.verifiers.host import Body, Conversation, Host, environment_of, host_of
from skyrl_gym.suggestions import did_you_mean

INFRASTRUCTURE = ("ProviderError", "SandboxError", "ToolsetError", "TunnelError", "InterceptionError", "TimeoutError")
"""verifiers' names of failures that say nothing about what the model did."""

TOOLS = """You can call these functions, each described by a JSON schema:
<tools>
{schemas}
</tools>

Write each call as a JSON object between tags:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


@dataclass
class VerifiersConfig:
    """Settings of `+environment.skyrl_gym.VerifiersEnv`."""

    tool_format: str = "hermes"
    """Form of tool calls in the model's text, of `skyrl_gym.chat.tool_formats`."""

    explain_tools: bool = True
    """List the functions, and the form of a call, in the system message. In another form than hermes the prompt must
    explain it: set this to false."""

    step_seconds: float = 600.0
    """Maximum time of a step: tools, further agents, and rewards after the last turn."""


class VerifiersEnv(BaseTextEnv):
    """Environment of verifiers with the model as its agent. Its harness, tools and limits are used unchanged.

    The dataset row contains `environment` (verifiers' settings: a mapping, its JSON text, or the id of a taskset) and
    `index`, the position of the task. `verifiers_rows` makes rows. The prompt is the environment's own.

    The reward of the last step is the reward of the agent's trace: the weighted sum of the taskset's rewards and
    judges. Each is in the metrics under its name. Agents other than the policy need a separate client in `environment`.
    """

    config_class = VerifiersConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self.config = typed_config(VerifiersConfig, env_config)
        if self.config.tool_format not in TOOL_FORMATS:
            hint = did_you_mean(self.config.tool_format, sorted(TOOL_FORMATS))
            raise TaskError(f"tool_format must be a tool call format; got {self.config.tool_format!r}; {hint}")
        self.format = TOOL_FORMATS[self.config.tool_format]
        self.environment = environment_of(required(extras, "environment"))
        required(extras, "index")
        self.index = whole_number(extras, "index", 0)
        self.reward = 0.0
        self._metrics: dict[str, object] = {}
        self._request: Body = {}
        self._host: Host | None = None
        self._conversation: Conversation | None = None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        """Start the episode. Returns the messages of the environment's first request, which replace `prompt`.

        Raises:
            Error: verifiers is not installed, the taskset is unknown, or the environment failed.
            InfraError: the environment's servers failed.
        """
        self._host = host_of(self.environment)
        self._conversation = self._host.start(self.index)
        event = self._next_event()
        if not isinstance(event, dict):
            self._score(event)
            raise Error(f"task {self.index} of {self._name} ended without a turn of the model")
        self._request = dict(event)
        return self._with_tools(list(event["messages"])), {}

    def _with_tools(self, messages: ConversationType) -> ConversationType:
        tools = self._request.get("tools") or []
        if not tools or not self.config.explain_tools:
            return messages
        if self.config.tool_format != "hermes":
            raise TaskError(
                f"explain_tools must be false with tool_format {self.config.tool_format!r}: it explains "
                "the hermes format"
            )
        text = TOOLS.format(schemas="\n".join(json.dumps(tool["function"]) for tool in tools))
        if messages and messages[0]["role"] == "system":
            text = f"{text_of(messages.pop(0))}\n\n{text}"
        return [{"role": "system", "content": text}, *messages]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Raises Error: the environment failed, or does not continue the conversation. InfraError: its servers did."""
        self.turns += 1
        assert self._host is not None and self._conversation is not None, "call init before step"
        self._host.answer(self._conversation, self._message(action))
        event = self._next_event()
        if isinstance(event, dict):
            return BaseTextEnvStepOutput(observations=self._news(event), reward=0.0, done=False, metadata={})
        trace = self._score(event)
        output = BaseTextEnvStepOutput(
            observations=[], reward=self.reward, done=True, metadata={"stop_condition": trace.stop_condition}
        )
        if trace.is_truncated:
            output["truncated"] = True
        return output

    def _message(self, action: str) -> Body:
        """Return the turn as an assistant message, with its tool calls if the request had tools."""
        schemas = self._request.get("tools") or []
        calls = (
            [call for call in self.format.parse(action, schemas) if not isinstance(call, Invalid)] if schemas else []
        )
        message: Body = {"role": "assistant", "content": action}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call{self.turns:03d}{place:02d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for place, call in enumerate(calls)
            ]
        return message

    def _news(self, request: Body) -> ConversationType:
        """Return the messages of a request that follow the last one and its answer. Raises Error."""
        before, messages = self._request["messages"], request["messages"]
        news: list[MessageType] = messages[len(before) + 1 :]
        if request["trace"] != self._request["trace"]:
            raise Error(
                f"two agents of {self._name} use the policy; configure another client for the one that must not"
            )
        if messages[: len(before)] != before or messages[len(before)]["role"] != "assistant" or not news:
            raise Error(
                f"{self._name} rewrote the conversation (for example by compaction), which one trajectory cannot "
                "represent; use a harness that only appends, or train through generator.harness"
            )
        self._request = dict(request)
        return [dict(message) for message in news]

    def _next_event(self) -> Any:
        assert self._host is not None and self._conversation is not None
        return self._host.next_event(self._conversation, self.config.step_seconds)

    def _score(self, episode: Any) -> Any:
        """Keep reward and metrics of the policy's trace, which is returned. Raises Error, InfraError."""
        traces = [trace for trace in episode.traces if trace.id == self._request.get("trace")] or episode.traces
        failures = [*episode.errors, *(error for trace in traces if not trace.ok for error in trace.errors)]
        if failures or not traces:
            last = failures[-1] if failures else None
            text = f"task {self.index} of {self._name}: {last.type}: {last.message}" if last else "no agent ran"
            raise InfraError(text) if last and last.type in INFRASTRUCTURE else Error(text)
        trace = traces[0]
        self.reward = float(trace.reward)
        self._metrics = {
            "outcome_reward": self.reward,
            **{f"reward/{name}": float(part.score) for name, part in trace.rewards.items() if part is not None},
            **{name: float(value) for name, value in trace.metrics.items() if value is not None},
        }
        return trace

    @property
    def _name(self) -> str:
        return f"verifiers environment {self.environment['taskset'].get('id')!r}"

    def get_metrics(self) -> dict[str, object]:
        return {"turns": self.turns, **self._metrics}

    def close(self) -> None:
        if self._conversation is not None and self._conversation.episode is not None:
            self._conversation.episode.cancel()
