"""Any environment registered with Gymnasium (CartPole to MuJoCo, and other packages' own) as a text environment."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    mapping_of,
    max_turns_of,
    required,
    typed_config,
    whole_number,
    with_user_text,
)
from skyrl_gym.error import Error, TaskError
from skyrl_gym.tags import last_tagged

if TYPE_CHECKING:
    from skyrl_gym.envs.gymnasium.player import Played, Player

DEFAULT_MAX_TURNS = 100
"""Maximum number of turns in environments without a time limit of their own."""


@dataclass
class GymnasiumConfig:
    """Settings of `environment.skyrl_gym.gymnasium`. Values of the same names in a dataset row take precedence."""

    actions_per_turn: int = 1
    """Maximum number of actions that a model may give in one turn, as a JSON list."""

    frame_skip: int = 1
    """Number of environment steps for which each action is repeated."""

    ansi: bool = False
    """Add the environment's own text rendering to observations (FrozenLake, Taxi, CliffWalking have one)."""

    describe: bool = True
    """Describe the task, the observations and the actions in the first message."""

    documentation_chars: int = 1500
    """Number of characters to which each section of the environment's own documentation is truncated in that message.
    0: no documentation."""

    digits: int = 4
    """Significant digits of numbers in observations."""

    max_numbers: int = 128
    """Maximum number of numbers in an observation; longer ones are truncated, with a note."""

    reward_scale: float = 1.0
    """Factor applied to the environment's rewards."""

    reward_range: tuple[float, float] | None = None
    """Returns that map to 0 and to 1 in `outcome_reward`, before `reward_scale`."""


class GymnasiumEnv(BaseTextEnv):
    """A Gymnasium environment played as text. The last `<action>...</action>` of each turn contains the action as JSON.

    The dataset row contains `env_id`; optionally `env_kwargs` (a mapping or its JSON text), `seed`, `max_turns` and
    settings of `GymnasiumConfig`. An illegal action returns the rule; it uses a turn and changes nothing.

    `outcome_reward` is the return, mapped from `reward_range` to [0, 1] and clipped; without a range, its fraction of a
    positive reward threshold of the environment, at most 1; with a negative threshold, 1 if a full-length episode
    reaches it, else 0; with neither, the unchanged return.
    """

    config_class = GymnasiumConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        extras = extras or {}
        self.config = _check_settings(typed_config(GymnasiumConfig, _parse_settings(env_config, extras)))
        self.seed = whole_number(extras, "seed", None)
        given = mapping_of("env_kwargs", extras.get("env_kwargs") or None)
        kwargs = {key: part for key, part in given.items() if part is not None}  # None is how parquet fills a mapping
        self.player = make_player(str(required(extras, "env_id")), kwargs, self.config)
        self.max_turns = max_turns_of(extras, self._get_default_max_turns())
        self.steps = 0
        self.episode_return = 0.0
        self.illegal_actions = 0
        self.terminated = False
        self.success: bool | None = None
        self._closed = False

    def _get_default_max_turns(self) -> int:
        limit = self.player.time_limit
        per_turn = self.config.actions_per_turn * self.config.frame_skip
        return math.ceil(limit / per_turn) if limit else DEFAULT_MAX_TURNS

    def init(self, prompt: ConversationType, seed: int | None = None) -> tuple[ConversationType, dict[str, object]]:
        """Add the task and the first observation to the last user message.

        A seed of the row wins over `seed`: it is part of the task.
        """
        self.player.reset(seed if self.seed is None else self.seed)
        parts = [self._describe_task()] if self.config.describe else []
        return with_user_text(prompt, "\n\n".join([*parts, self._format_observation()])), {}

    def _describe_task(self) -> str:
        text = f"{self.player.task(self.config.documentation_chars)}\n\nAct by writing <action>your action</action>."
        if self.config.actions_per_turn > 1:
            text += (
                f" You may give a JSON list of 1 to {self.config.actions_per_turn} actions, which are taken in order "
                f"until the episode ends."
            )
        if self.config.frame_skip > 1:
            text += f" Each action is taken for {self.config.frame_skip} steps."
        example = self.player.sample_action()
        if example is not None:
            text += f" For example: <action>{example}</action>"
        return f"{text}\nThere are {self.max_turns} turns."

    def _format_observation(self) -> str:
        picture = f"\n{self.player.picture()}" if self.config.ansi else ""
        return f"Observation:\n{self.player.observation()}{picture}"

    def step(self, action: str) -> BaseTextEnvStepOutput:
        from skyrl_gym.envs.gymnasium.spaces import IllegalAction

        self.turns += 1
        try:
            actions = self.player.read_actions(extract_last_action(action), self.config.actions_per_turn)
        except IllegalAction as fault:
            self.illegal_actions += 1
            return self._handle_illegal_action(str(fault))
        played = self.player.play(actions, self.config.frame_skip)
        self._count(played)
        done = played.terminated or played.truncated or self.turns >= self.max_turns
        output = BaseTextEnvStepOutput(
            observations=[] if done else [self._make_reply(played, len(actions))],
            reward=played.reward * self.config.reward_scale,
            done=done,
            metadata={"steps": played.steps},
        )
        if done and not played.terminated:
            output["truncated"] = True
        return output

    def _handle_illegal_action(self, fault: str) -> BaseTextEnvStepOutput:
        done = self.turns >= self.max_turns
        text = f"Illegal action: {fault}. An action is {self.player.describe_action_rule()}. Nothing has changed."
        reply = {"role": "user", "content": f"{text} {self._format_turns_left()}"}
        output = BaseTextEnvStepOutput(
            observations=[] if done else [reply], reward=0.0, done=done, metadata={"illegal": fault}
        )
        if done:
            output["truncated"] = True
        return output

    def _make_reply(self, played: "Played", num_actions: int) -> dict[str, object]:
        taken = f" after {num_actions} actions" if num_actions > 1 else ""
        reward = f"Reward{taken}: {played.reward:.{self.config.digits}g}"
        return {"role": "user", "content": f"{reward}\n{self._format_observation()}\n{self._format_turns_left()}"}

    def _format_turns_left(self) -> str:
        left = self.max_turns - self.turns
        return f"{left} turn{'' if left == 1 else 's'} left."

    def _count(self, played: "Played") -> None:
        self.steps += played.steps
        self.episode_return += played.reward
        self.terminated = played.terminated
        self.success = self.success if played.success is None else played.success
        if not math.isfinite(self.episode_return):
            raise Error(f"{self.player.env.spec} returned a reward that is not a finite number: {played.reward}")

    @property
    def reaches_threshold(self) -> bool:
        """Whether the return reaches the environment's reward threshold of a solved task. With a threshold of at most 0
        (rewards are costs), an episode that was cut short does not count.
        """
        threshold = self.player.threshold
        if threshold is None or self.episode_return < threshold:
            return False
        return threshold > 0 or self.terminated or self.steps >= (self.player.full_length or math.inf)

    @property
    def outcome_reward(self) -> float:
        threshold = self.player.threshold
        if self.config.reward_range is not None:
            low, high = self.config.reward_range
        elif threshold is not None and threshold > 0:
            low, high = 0.0, float(threshold)
        elif threshold is not None:
            return float(self.reaches_threshold)
        else:
            return self.episode_return
        return min(max((self.episode_return - low) / (high - low), 0.0), 1.0)

    def get_metrics(self) -> dict[str, object]:
        metrics: dict[str, object] = {
            "outcome_reward": self.outcome_reward,
            "return": self.episode_return,
            "steps": self.steps,
            "turns": self.turns,
            "illegal_actions": self.illegal_actions,
            "terminated": self.terminated,
        }
        success = self.success
        if success is None and self.player.threshold is not None:
            success = self.reaches_threshold
        return metrics if success is None else metrics | {"success": success}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.player.env.close()

    @classmethod
    def examples(cls) -> list[Example]:
        """Raises Error if Gymnasium is not installed."""
        _check_installed()
        from skyrl_gym.envs.gymnasium.examples import examples

        return examples()


def extract_last_action(text: str) -> str:
    """Extract the last closed `<action>...</action>`. Raises IllegalAction without one."""
    from skyrl_gym.envs.gymnasium.spaces import IllegalAction

    action = last_tagged(text, "action")
    if action is None:
        raise IllegalAction("there is no <action>...</action> in what you wrote")
    return action.strip()


def make_player(env_id: str, env_kwargs: Mapping[str, object], config: GymnasiumConfig) -> "Player":
    """Raises TaskError for an environment that there is not, Error for a package that is not installed."""
    _check_installed()
    from skyrl_gym.envs.gymnasium.player import Player, make_environment

    return Player(make_environment(env_id, env_kwargs, config.ansi), config.digits, config.max_numbers)


def _check_installed() -> None:
    try:
        import gymnasium  # noqa: F401
    except ImportError as missing:
        raise Error("Gymnasium is not installed: pip install 'skyrl-gym[gymnasium]'") from missing


def _parse_settings(env_config: object, extras: Mapping[str, object]) -> dict[str, Any]:
    config = vars(typed_config(GymnasiumConfig, env_config))
    return {name: value if extras.get(name) is None else extras[name] for name, value in config.items()}


def _check_settings(config: GymnasiumConfig) -> GymnasiumConfig:
    for name in ("actions_per_turn", "frame_skip", "digits", "max_numbers"):
        if getattr(config, name) < 1:
            raise TaskError(f"{name} must be 1 or more; got {getattr(config, name)}")
    if config.reward_range is not None:
        bounds = list(config.reward_range) if isinstance(config.reward_range, Iterable) else []
        if len(bounds) != 2 or not all(isinstance(bound, Real) for bound in bounds) or not bounds[0] < bounds[1]:
            raise TaskError(f"reward_range must be two numbers, the lower one first; got {config.reward_range!r}")
    return config
