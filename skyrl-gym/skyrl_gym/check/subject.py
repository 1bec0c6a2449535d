"""Environment under test: its construction, its tasks, and timed calls in separate threads."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_gym.core import Env
from skyrl_gym.deadline import DeadlineExceeded, call_before_deadline, outcome_of
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType, Example
from skyrl_gym.envs.registration import EnvSpec, env_class_of, make, spec
from skyrl_gym.episode import Episode


def spec_of(env: object) -> EnvSpec:
    """Return the spec behind an id, "package.module:Class", a spec, a class, a factory or an environment.

    Raises:
        Error: no environment of that id.
        TypeError: none of these.
    """
    if isinstance(env, EnvSpec):
        return env
    if isinstance(env, str):
        return EnvSpec(id=env, entry_point=env) if ":" in env else spec(env)
    if isinstance(env, Env) and env.spec is not None:
        kwargs = {name: value for name, value in env.spec.kwargs.items() if name not in ("extras", "env_config")}
        return EnvSpec(id=env.spec.id, entry_point=env.spec.entry_point, kwargs=kwargs)
    if not isinstance(env, Env) and not callable(env):
        raise TypeError(f"expected an id, a spec, a class or an environment; got {env!r:.200}")
    creator: Any = type(env) if isinstance(env, Env) else env
    return EnvSpec(id=getattr(creator, "__name__", repr(creator)), entry_point=creator)


def examples_of(env_spec: EnvSpec) -> list[Example]:
    """Return the examples that the environment's class defines; none if a factory does not tell its class."""
    return getattr(env_class_of(env_spec), "examples", list)()


def tasks_of(env_spec: EnvSpec, prompts: Any, env_config: Mapping[str, object] | None) -> list[Example]:
    if prompts is None:
        prompts = examples_of(env_spec)
    return [_add_config(_to_example(task), env_config) for task in prompts]


def _to_example(task: Any) -> Example:
    if isinstance(task, Example):
        return task
    if isinstance(task, Mapping):
        extras = {str(name): value for name, value in task.items() if name != "prompt"}
        return Example(prompt=task["prompt"], extras=extras, oracle=[])
    return Example(prompt=task, extras={}, oracle=[])


def _add_config(example: Example, env_config: Mapping[str, object] | None) -> Example:
    return replace(example, env_config={**example.env_config, **(env_config or {})}) if env_config else example


@dataclass
class Subject:
    """The environment under test, and the clock on it."""

    env_spec: EnvSpec
    examples: list[Example]
    seconds_per_call: float
    times: dict[str, float] = field(default_factory=dict)

    def call(self, name: str, function: Callable[..., object], *args: object) -> Any:
        started = time.perf_counter()
        try:
            return call_before_deadline(self.seconds_per_call, function, *args)
        except DeadlineExceeded as late:
            raise DeadlineExceeded(f"{name} {late}") from None
        finally:
            self.times[name] = max(time.perf_counter() - started, self.times.get(name, 0.0))

    def make(self, example: Example, **changed_extras: object) -> "Run":
        """Create an environment for the example's task. `changed_extras` override columns of the row."""
        extras = copy.deepcopy({**example.extras, **changed_extras})
        return self.make_with(extras, example.env_config)

    def make_with(self, extras: object, env_config: object) -> "Run":
        env = self.call("the constructor", lambda: make(self.env_spec, env_config=env_config, extras=extras))
        return Run(self, env)

    def play(self, example: Example, actions: Sequence[str], seed: int | None = 7, **extras: object) -> "Transcript":
        with self.make(example, **extras) as run:
            transcript = Transcript(run.init(example.prompt, seed))
            for action in actions:
                transcript.outputs.append(run.step(action))
                if transcript.outputs[-1]["done"]:
                    break
            return transcript

    def slowest(self) -> str:
        name, seconds = max(self.times.items(), key=lambda item: item[1])
        return f"{name}, {seconds:.3f} s"


class Run:
    """One environment whose calls run in separate threads, with a deadline."""

    def __init__(self, subject: Subject, env: Env) -> None:
        self.subject = subject
        self.env = env
        self.episode = Episode(env)

    def init(self, prompt: ConversationType, seed: int | None = None) -> ConversationType:
        return list(self.subject.call("init", self.episode.init, copy.deepcopy(prompt), seed))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return copy.deepcopy(self.subject.call("step", self.episode.step, action))

    def metrics(self) -> dict[str, object]:
        return self.subject.call("get_metrics", self.episode.metrics)

    def close(self) -> None:
        self.subject.call("close", self.episode.close)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        error = outcome_of(self.close)
        if isinstance(error, Exception) and kind is None:  # else the first error is the one to report
            raise error


@dataclass
class Transcript:
    """Record of an environment's outputs in one episode."""

    first: ConversationType
    outputs: list[BaseTextEnvStepOutput] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1]["done"]

    def difference(self, other: "Transcript") -> str | None:
        """Describe the first difference between two episodes, or return None."""
        if self.first != other.first:
            return f"init returned {self.first!r:.120} and {other.first!r:.120}"
        for turn, (mine, theirs) in enumerate(zip(self.outputs, other.outputs, strict=False), start=1):
            for key in ("observations", "reward", "done"):
                if mine[key] != theirs[key]:
                    return f"{key} of step {turn} were {mine[key]!r:.120} and {theirs[key]!r:.120}"
        return None if len(self.outputs) == len(other.outputs) else "one episode was longer"
