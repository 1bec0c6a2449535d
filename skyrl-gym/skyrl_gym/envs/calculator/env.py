"""Arithmetic with a calculator: the model may ask for the value of an expression, then it must state the answer."""

from skyrl_gym.envs.arithmetic.problems import example_of, extract_answer
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of, max_turns_of
from skyrl_gym.envs.calculator.problems import make_problems
from skyrl_gym.tags import first_tagged
from skyrl_gym.tools.calculator import CalculatorError, CalculatorToolGroup

DEFAULT_MAX_TURNS = 2
NO_ACTION = "Write an expression inside <calculator> tags, or the final number inside <answer> tags."


class CalculatorEnv(BaseTextEnv):
    """Arithmetic with a calculator tool. An `<answer>` ends the episode: reward 1 if correct, else 0.

    A `<calculator>` call returns a user message `<result>VALUE</result>`. The last of `max_turns` turns (from the
    extras, default 2) ends the episode in any case, so a single turn leaves no room for a call."""

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        extras = extras or {}
        self.ground_truth = str(ground_truth_of(extras)).strip()
        self.max_turns = max_turns_of(extras, DEFAULT_MAX_TURNS)
        self.num_calls = 0
        self.tool_group = CalculatorToolGroup()
        self.init_tool_groups([self.tool_group])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = extract_answer(action)
        if answer is not None or self.turns >= self.max_turns:
            reward = 1.0 if answer == self.ground_truth else 0.0
            return BaseTextEnvStepOutput(
                observations=[],
                reward=reward,
                done=True,
                truncated=answer is None,
                metadata={"parsed_answer": answer},
            )
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": self._make_reply(action)}], reward=0.0, done=False, metadata={}
        )

    def _make_reply(self, action: str) -> str:
        expression = first_tagged(action, "calculator")
        if expression is None:
            return NO_ACTION
        self.num_calls += 1
        try:
            result = self._execute_tool(self.tool_group.name, "calculator", [expression])
        except CalculatorError as failure:
            result = f"error: {failure}"
        return f"<result>{result}</result>"

    def get_metrics(self) -> dict[str, object]:
        return {"turns": self.turns, "calculator_calls": self.num_calls}

    @classmethod
    def examples(cls) -> list[Example]:
        return [_add_call(example_of(row)) for row in make_problems(4, num_digits=3, seed=1)]


def _add_call(example: Example) -> Example:
    """Return the example with a tool call before the answer."""
    call = f"<calculator>{example.extras['extra_info']['problem']}</calculator>"
    return Example(example.prompt, example.extras, oracle=[call, *example.oracle])
