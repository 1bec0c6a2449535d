"""One turn that a language model judges against the reference answer: any OpenAI-compatible server."""

from dataclasses import dataclass

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    ground_truth_of,
    last_user_text,
    typed_config,
)
from skyrl_gym.graders import Score, reward_of
from skyrl_gym.graders.judge import Judge, JudgeSettings

_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class LLMJudgeEnvConfig(JudgeSettings):
    """Settings of the `llm_as_a_judge` environment."""


class LLMJudgeEnv(BaseTextEnv):
    """The reward is the judge's score from 0 to 1. `extras["reward_spec"]["ground_truth"]` is the reference answer.

    The judge gets the last user message, the reference and the model's response, which can influence it: see
    `skyrl_gym.graders.judge`. A judge that fails, or returns no score, raises `InfraError` and is never scored 0. To
    try the environment without a model, use `LocalJudge` in `local_judge`.

    Raises:
        ValueError: the public service has no key, or the prompt template has no placeholder for the answer.
    """

    config_class = LLMJudgeEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.ground_truth = str(ground_truth_of(extras or {}))
        self.judge = Judge(typed_config(LLMJudgeEnvConfig, env_config))
        self.question = ""

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        self.question = last_user_text(prompt)
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Raises InfraError if the judge fails."""
        self.turns += 1
        grade = self.judge.grade(self.question, self.ground_truth, action)
        reward = reward_of(grade)
        reply = str(grade.details["reply"])[-_SHOWN_CHARACTERS:] if isinstance(grade, Score) else ""
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"judge_reply": reply})

    def close(self) -> None:
        self.judge.close()

    @classmethod
    def examples(cls) -> list[Example]:
        """Return examples that need a judge: give the environment the `base_url` of one."""
        return [
            Example(
                prompt=[{"role": "user", "content": f"{question} Explain, and end with the answer."}],
                extras={"reward_spec": {"method": "judge", "ground_truth": answer}},
                oracle=[f"{steps} The answer is {answer}"],
            )
            for question, steps, answer in _PROBLEMS
        ]


GSM8kLLMJudgeEnv = LLMJudgeEnv
GSM8kLLMJudgeEnvConfig = LLMJudgeEnvConfig

_PROBLEMS = [
    ("A baker fills 26 trays with 18 rolls each and sells 139 rolls. How many are left?", "26 * 18 = 468.", "329"),
    (
        "A tank holds 2400 litres and loses 17 litres an hour. How much is left after 23 hours?",
        "17 * 23 = 391.",
        "2009",
    ),
    ("Seats cost 35 each. A school buys 48 and gets 126 off. What does it pay?", "48 * 35 = 1680.", "1554"),
    ("A clerk sorts 58 letters a minute. How many does he sort in 2 hours and 5 minutes?", "125 minutes.", "7250"),
]
