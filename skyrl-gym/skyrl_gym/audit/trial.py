"""Trial runs of an environment's examples with each policy."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from skyrl_gym.audit.cheats import Turns, cheats_for
from skyrl_gym.audit.report import AuditReport, PolicyOutcome
from skyrl_gym.check import examples_of, spec_of
from skyrl_gym.deadline import DeadlineExceeded, call_before_deadline
from skyrl_gym.envs.base_text_env import Example
from skyrl_gym.envs.registration import EnvSpec, env_class_of, make
from skyrl_gym.episode import EpisodeResult, run_episode

MAX_STEPS = 50
"""Maximum number of turns in an environment that does not end by itself; a longer solution gets its own length."""

NUM_THREADS = 4
"""Episodes at the same time: most wait for a sandbox or a server."""

EPISODE_SECONDS = 300.0


def audit(
    env: object,
    examples: Sequence[Example] | None = None,
    *,
    env_config: Mapping[str, object] | None = None,
    max_turns: int | None = None,
) -> AuditReport:
    """Play the oracle and every cheat (`cheats_for`) on every example.

    Args:
        env: an id, "package.module:Class", a spec or a class.
        examples: default: the `examples()` of the environment.
        env_config: settings that override the settings of the examples; see `services_for`.
        max_turns: overrides the turn limit of the examples.

    Raises:
        ValueError: the example list is empty, or an example has no oracle.
        InfraError: a required service does not work, so there is no result.
        TimeoutError: an episode does not end.
    """
    env_spec = spec_of(env)
    tasks = list(examples_of(env_spec) if examples is None else examples)
    if not tasks or not all(task.oracle for task in tasks):
        raise ValueError(f"{env_spec.id} cannot be audited: it needs examples() with an oracle each")
    tasks = [_set_env_config(task, env_config, max_turns) for task in tasks]
    oracle = _run_policy(env_spec, "oracle", [(task, task.oracle) for task in tasks])
    cheaters = []
    for cheat in cheats_for(env_class_of(env_spec), tasks):
        attempts = [(task, turns) for task in tasks if (turns := cheat.turns(task)) is not None]
        if attempts:
            cheaters.append(_run_policy(env_spec, cheat.name, attempts))
    return AuditReport(env_spec.id, len(tasks), oracle, cheaters)


def _set_env_config(task: Example, env_config: Mapping[str, object] | None, max_turns: int | None) -> Example:
    limit = {} if max_turns is None else {"max_turns": max_turns}
    return replace(task, extras={**task.extras, **limit}, env_config={**task.env_config, **(env_config or {})})


def _run_policy(env_spec: EnvSpec, name: str, attempts: list[tuple[Example, Turns]]) -> PolicyOutcome:
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="skyrl-gym-audit") as threads:
        results = list(threads.map(lambda attempt: _run_with_deadline(env_spec, name, *attempt), attempts))
    return PolicyOutcome(
        name, [result.outcome_reward for result in results], [result.total_reward for result in results]
    )


def _run_with_deadline(env_spec: EnvSpec, name: str, task: Example, turns: Turns) -> EpisodeResult:
    try:
        return call_before_deadline(EPISODE_SECONDS, play, env_spec, task, turns)
    except DeadlineExceeded as late:
        raise DeadlineExceeded(f"an episode of {name!r} {late}") from None


def play(env_spec: EnvSpec, task: Example, turns: Turns) -> EpisodeResult:
    """Play an episode with fixed model turns. The last turn repeats until the episode ends."""
    env = make(env_spec, env_config=dict(task.env_config), extras=copy.deepcopy(task.extras))

    texts = itertools.chain(turns, itertools.repeat(turns[-1]))
    max_steps = max(MAX_STEPS, len(task.oracle))
    return run_episode(env, copy.deepcopy(task.prompt), lambda messages: next(texts), max_steps=max_steps)
