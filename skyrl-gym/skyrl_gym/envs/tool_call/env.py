"""Function calls in one turn: 1 if the answer calls the expected functions with accepted arguments, else 0."""

import json
from collections.abc import Mapping

from skyrl_gym.chat.tool_calls import Invalid, parse_tool_calls
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of
from skyrl_gym.error import TaskError
from skyrl_gym.graders.function_calls import ExpectedCall, grade_calls
from skyrl_gym.graders.results import reward_of


class ToolCallEnv(BaseTextEnv):
    """`extras["reward_spec"]["ground_truth"]` is a list of expected calls `{name: {argument: [accepted values]}}`, or
    its JSON text (`skyrl_gym.graders.function_calls` has the rules); an empty list expects an answer without a call.

    The system message lists the functions (`prompt.system_message`). Calls are read in the form of Hermes and Qwen
    (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`), outside of thoughts; a malformed call makes the answer
    wrong. An empty response solves every row that expects no call: mix them with rows that expect calls.
    """

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None) -> None:
        super().__init__()
        self.expected = _get_expected_calls(ground_truth_of(extras or {}))
        self.outcome_reward = 0.0
        self.num_calls = 0
        self.is_well_formed = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        found = parse_tool_calls(action, "hermes")
        malformed = [call.reason for call in found if isinstance(call, Invalid)]
        calls = [(call.name, call.arguments) for call in found if not isinstance(call, Invalid)]
        self.num_calls, self.is_well_formed = len(found), not malformed
        grade = Invalid(malformed[0]) if malformed else grade_calls(calls, self.expected)
        self.outcome_reward = reward_of(grade)
        metadata = {
            "parsed_answer": None if isinstance(grade, Invalid) else grade.prediction,
            "reason": grade.reason if isinstance(grade, Invalid) else None,
        }
        return BaseTextEnvStepOutput(observations=[], reward=self.outcome_reward, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, object]:
        return {
            "outcome_reward": self.outcome_reward,
            "calls": self.num_calls,
            "well_formed": self.is_well_formed,
        }

    @classmethod
    def examples(cls) -> list[Example]:
        """Return tasks that expect calls: one that expects none would be solved by cheats that write nothing."""
        from skyrl_gym.envs.tool_call.examples import make_examples

        return make_examples()

    @classmethod
    def cheats(cls) -> list[object]:
        """Return policies that call without reading, or write the right calls in a wrong way."""
        from skyrl_gym.envs.tool_call.examples import CHEATS

        return list(CHEATS)


def _get_expected_calls(ground_truth: object) -> list[ExpectedCall]:
    rule = "reward_spec.ground_truth must be a list of calls {name: {argument: [accepted values]}}, or its JSON text"
    try:
        calls = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as mistake:
        raise TaskError(f"{rule}: {mistake}; got {ground_truth!r:.200}") from None
    if not isinstance(calls, list) or not all(_is_expected_call(call) for call in calls):
        raise TaskError(f"{rule}; got {ground_truth!r:.200}")
    return calls


def _is_expected_call(call: object) -> bool:
    if not isinstance(call, Mapping) or len(call) != 1:
        return False
    (accepted,) = call.values()
    return isinstance(accepted, Mapping) and all(isinstance(values, list) for values in accepted.values())
