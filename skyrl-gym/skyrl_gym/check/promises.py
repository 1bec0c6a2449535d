"""Checks of an environment's contract, one function each, which yield the violations."""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from skyrl_gym.check.findings import check_messages, check_metrics, check_output, describe, make_error, make_warning
from skyrl_gym.check.hostile import HOSTILE_ACTIONS, IDLE_ACTION
from skyrl_gym.check.report import Finding
from skyrl_gym.check.subject import Subject, Transcript
from skyrl_gym.deadline import DeadlineExceeded, outcome_of
from skyrl_gym.envs.base_text_env import Example
from skyrl_gym.episode import ContractError, has_seed_argument
from skyrl_gym.error import Error, TaskError

Promise = Callable[[Subject], Iterator[Finding]]
PROMISES: dict[str, Promise] = {}


def promise(name: str) -> Callable[[Promise], Promise]:
    def add(function: Promise) -> Promise:
        PROMISES[name] = function
        return function

    return add


def run_promise(name: str, check: Promise, subject: Subject) -> list[Finding]:
    """Return a check's findings; an exception in it is one more."""
    findings: list[Finding] = []
    error = error_of(lambda: findings.extend(check(subject)))
    if error is not None:
        findings.append(make_error(_describe(error)))
    return [replace(found, check=name) for found in findings]


def error_of(function: Callable[..., object], *args: object) -> Exception | None:
    """Call a function of users' code. Returns the exception that it raised, of any class, or None."""
    outcome = outcome_of(function, *args)
    return outcome if isinstance(outcome, Exception) else None


def _describe(error: Exception) -> str:
    """Render an exception: a broken contract says it all by itself, anything else needs its class and place."""
    return str(error) if isinstance(error, ContractError | DeadlineExceeded) else f"raised {describe(error)}"


@promise("constructor")
def _check_constructor(subject: Subject) -> Iterator[Finding]:
    """Check construction with `{}` and None: trainers pass either when an environment has no settings."""
    for example in subject.examples[:1]:
        for env_config in (None, {}):
            extras = copy.deepcopy(example.extras)
            error = error_of(
                lambda extras, env_config: subject.make_with(extras, env_config).close(), extras, env_config
            )
            # The three classes mean a setting without a usable default, named by the environment.
            if error is not None and not isinstance(error, TaskError | FileNotFoundError | ValueError):
                yield make_error(f"with env_config={env_config!r} raised {describe(error)}")


@promise("episode")
def _check_episode(subject: Subject) -> Iterator[Finding]:
    """Check types, messages, turns and metrics with the example's own solution, or idle talk."""
    for example in subject.examples:
        actions = example.oracle or [IDLE_ACTION] * 8
        prompt = copy.deepcopy(example.prompt)
        with subject.make(example) as run:
            given = copy.deepcopy(prompt)
            # Without a seed: a solution may belong to the row's own seed.
            first = subject.call("init", run.episode.init, given)
            yield from check_messages("init", first)
            if given != prompt and given is not first:
                yield make_error("init modifies its prompt argument; return a new list")
            done = False
            for turn, action in enumerate(actions, start=1):
                output = run.step(action)
                done = output["done"]
                yield from check_output(run.env, output, turn, is_single=done and turn == 1)
                if done:
                    if example.oracle and turn < len(actions):
                        yield make_error(
                            f"the example's solution has {len(actions)} turns, but the episode ended at turn {turn}"
                        )
                    break
            if example.oracle and not done:
                yield make_error(f"the example's solution ({len(actions)} turns) does not end the episode")
            yield from check_metrics(run.env, run.metrics())


@promise("closing")
def _check_closing(subject: Subject) -> Iterator[Finding]:
    """Check `close` before `init`, called twice, and after an episode that was left early."""
    example = subject.examples[0]
    for stage in ("before init", "after init", "after a step"):
        run = subject.make(example)
        if stage != "before init":
            run.init(example.prompt)
        if stage == "after a step":
            run.step(IDLE_ACTION)
        for attempt in ("close", "a second close"):
            error = error_of(run.close)
            if error is not None:
                yield make_error(f"{attempt} {stage} raised {describe(error)}")


@promise("metrics before the first step")
def _check_early_metrics(subject: Subject) -> Iterator[Finding]:
    """Check metrics before the first step: a prompt that is too long ends an episode there."""
    example = subject.examples[0]
    with subject.make(example) as run:
        run.init(example.prompt)
        yield from check_metrics(run.env, run.metrics())


@promise("turn limit")
def _check_turn_limit(subject: Subject) -> Iterator[Finding]:
    """Check that `max_turns` of the row ends the episode for any model behaviour."""
    example = subject.examples[0]
    for limit in (1, 2):
        transcript = subject.play(example, [IDLE_ACTION] * (limit + 1), max_turns=limit)
        if len(transcript.outputs) > limit or not transcript.is_done:
            yield make_error(f"extras['max_turns'] = {limit} did not end the episode by step {limit}")
        elif transcript.outputs[-1]["observations"]:
            yield make_warning("the last step has observations, which are never used")
    own_limit = _get_own_limit(subject, example)
    if own_limit is not None:
        transcript = subject.play(example, [IDLE_ACTION] * (own_limit + 1))
        if not transcript.is_done:
            yield make_error(f"max_turns is {own_limit}, but {own_limit + 1} idle steps did not end the episode")
        elif len(transcript.outputs) > own_limit:
            yield make_error(f"max_turns is {own_limit}, but the episode ended at step {len(transcript.outputs)}")


def _get_own_limit(subject: Subject, example: Example) -> int | None:
    with subject.make(example) as run:
        run.init(example.prompt)
        limit = getattr(run.env, "max_turns", None)
    return limit if isinstance(limit, int) and 0 < limit <= 1000 else None


@promise("a step after done")
def _step_after_done(subject: Subject) -> Iterator[Finding]:
    """Check a step after done: it must return an output or raise an error with a message."""
    example = subject.examples[0]
    with subject.make(example) as run:
        run.init(example.prompt)
        for action in example.oracle or [IDLE_ACTION] * 1000:
            if run.step(action)["done"]:
                break
        output = outcome_of(run.step, IDLE_ACTION)
        if isinstance(output, Error | RuntimeError | ContractError):
            return  # said so
        if isinstance(output, Exception):
            yield make_warning(f"raised {describe(output)}; raise a clear error or return another done step")
        elif not output["done"]:
            yield make_warning("does not return done again")


@promise("determinism")
def _check_determinism(subject: Subject) -> Iterator[Finding]:
    """Check that the same seed and actions give the same episode."""
    for example, actions in ((each, actions) for each in subject.examples[:2] for actions in _build_scripts(each)):
        runs = [subject.play(example, actions, seed=7) for _ in range(2)]
        difference = runs[0].difference(runs[1])
        if difference is None:
            continue
        with subject.make(example) as run:
            is_seeded = has_seed_argument(run.env)
        hint = "" if is_seeded else "; let init accept a seed if the environment is random"
        yield make_error(f"the same seed and actions gave different episodes: {difference}{hint}")


def _build_scripts(example: Example) -> list[list[str]]:
    """Return the solution, and a model that comes to it late: in one turn the second is only its idle first turn."""
    return [example.oracle, [IDLE_ACTION, *example.oracle]] if example.oracle else [[IDLE_ACTION] * 4]


@promise("isolation")
def _check_isolation(subject: Subject) -> Iterator[Finding]:
    """Check that two interleaved episodes give the same results as separate ones."""
    pair = [subject.examples[0], subject.examples[-1]]
    actions = [_build_scripts(example)[0] for example in pair]
    alone = [subject.play(example, actions[index]) for index, example in enumerate(pair)]
    with subject.make(pair[0]) as left, subject.make(pair[1]) as right:
        runs = (left, right)
        together = [Transcript(run.init(example.prompt, 7)) for run, example in zip(runs, pair, strict=True)]
        for turn in range(max(map(len, actions))):
            for index, run in enumerate(runs):
                if turn < len(actions[index]) and not together[index].is_done:
                    together[index].outputs.append(run.step(actions[index][turn]))
    for index, example in enumerate(pair):
        difference = alone[index].difference(together[index])
        if difference is not None:
            yield make_error(
                f"an episode differs if another one runs concurrently, so instances share state: {difference} (prompt "
                f"{str(example.prompt[-1].get('content'))[:60]!r})"
            )


@promise("rows")
def _check_rows(subject: Subject) -> Iterator[Finding]:
    """Check that rows stay unchanged: they are sent between processes and reused in the next epoch."""
    for example in subject.examples:
        failure = error_of(pickle.dumps, (example.prompt, example.extras, example.env_config))
        if failure is not None:
            yield make_error(f"prompt, extras and settings of a row must pickle: {failure}")
        extras = copy.deepcopy(example.extras)
        prompt = copy.deepcopy(example.prompt)
        with subject.make_with(extras, example.env_config) as run:
            subject.call("init", run.episode.init, prompt, 7)
            for action in example.oracle or [IDLE_ACTION]:
                if run.step(action)["done"]:
                    break
        if extras != example.extras:
            yield make_error("the environment modifies its row (extras); copy it before modifying")


def _get_first_step_error(subject: Subject, example: Example, extras: Mapping[str, object] | None) -> Exception | None:
    """Return the exception of an idle first step with these columns, or None. Raises InfraError."""

    def play() -> None:
        with subject.make_with(extras, example.env_config) as run:
            run.init(example.prompt)
            run.step(IDLE_ACTION)

    return error_of(play)


@promise("incomplete rows")
def _check_incomplete_rows(subject: Subject) -> Iterator[Finding]:
    """Check that a row without a column is either accepted, or a `TaskError` that names the column."""
    example = subject.examples[0]
    for name, extras in _check_incomplete_row(example.extras):
        error = _get_first_step_error(subject, example, extras)
        if isinstance(error, TaskError | FileNotFoundError):
            if name and name.split(".")[-1] not in str(error):
                yield make_warning(f"a row without {name} raises an error that does not name it: {error!s:.200}")
        elif error is not None:
            yield make_error(f"a row without {name or 'any columns'} must raise TaskError; it raised {describe(error)}")


@promise("misused columns")
def _check_misused_columns(subject: Subject) -> Iterator[Finding]:
    """Check that a column of a wrong type is a `TaskError` that names it, if it matters."""
    example = subject.examples[0]
    for name in example.extras:
        for value in _MISUSES:
            error = _get_first_step_error(subject, example, copy.deepcopy({**example.extras, name: value}))
            if error is not None and not isinstance(error, TaskError | FileNotFoundError):
                yield make_warning(f"a row with {name} = {value!r} should raise TaskError; it raised {describe(error)}")
                break


_MISUSES = (-1, "\0", [], {"ground_truth": [None]}, 3.5)


def _check_incomplete_row(extras: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object] | None]]:
    yield "", {}
    yield "", None
    for name, value in extras.items():
        yield name, copy.deepcopy({other: extras[other] for other in extras if other != name})
        if name in ("reward_spec", "reward_model") and isinstance(value, Mapping):
            for key in value:
                smaller = {other: value[other] for other in value if other != key}
                yield f"{name}.{key}", copy.deepcopy({**extras, name: smaller})


@promise("hostile actions")
def _check_hostile_actions(subject: Subject) -> Iterator[Finding]:
    """Check that no text of a model causes an exception."""
    example = subject.examples[0]

    def play(name: str, action: str) -> Iterator[Finding]:
        with subject.make(example) as run:
            run.init(example.prompt, 7)
            for _ in range(3):
                output = run.step(action)
                yield from check_messages(f"after {name!r} step", output["observations"])
                if output["done"]:
                    break
            yield from check_metrics(run.env, run.metrics())

    for name, action in HOSTILE_ACTIONS.items():
        findings: list[Finding] = []
        error = error_of(lambda findings=findings, name=name, action=action: findings.extend(play(name, action)))
        yield from findings
        if error is not None:
            yield make_error(f"{name}: {_describe(error)}")
