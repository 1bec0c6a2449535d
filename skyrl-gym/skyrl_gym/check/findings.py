"""Faults of one message, one step's output, one set of metrics."""

import copy
import inspect
import json
from collections.abc import Iterator
from numbers import Real
from typing import Any

from skyrl_gym.check.report import Finding
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType


def make_error(text: str) -> Finding:
    return Finding("error", "", text)


def make_warning(text: str) -> Finding:
    return Finding("warning", "", text)


def describe(error: BaseException) -> str:
    frames = inspect.getinnerframes(error.__traceback__, context=0) if error.__traceback__ else []
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error!s:.300}{where}"


def check_output(env: object, output: BaseTextEnvStepOutput, turn: int, is_single: bool) -> Iterator[Finding]:
    if not isinstance(output["reward"], float):
        yield make_warning(f"reward should be a float; got {type(output['reward']).__name__}")
    if not isinstance(output.get("metadata", {}), dict):
        yield make_error(f"metadata must be a dict; got {output.get('metadata')!r:.120}")
    if output.get("postprocessed_action") is not None:
        yield make_warning("postprocessed_action trains the model on tokens that it did not generate")
    yield from check_messages("step", output["observations"])
    turns = getattr(env, "turns", None)
    if turns is not None and turns != turn:
        text = f"turns is {turns} after step {turn}; increment it at the start of step"
        yield make_warning(text) if is_single else make_error(text)


def check_messages(method: str, messages: ConversationType) -> Iterator[Finding]:
    for message in messages:
        if message["role"] not in ("system", "user", "assistant", "tool", "developer"):
            yield make_error(
                f"{method} returned a message of role {message['role']!r}, which chat templates do not support"
            )
        content = message.get("content")
        texts = [content] if isinstance(content, str) else _get_part_texts(content)
        if texts is None and not message.get("tool_calls"):
            yield make_error(
                f"{method} returned a message whose content is neither text nor a list of typed parts: {content!r:.120}"
            )
        try:
            json.dumps(message)
            for text in texts or []:
                text.encode("utf-8")
        except UnicodeEncodeError as failure:
            yield make_error(
                f"{method} returned text that is not valid Unicode and cannot be tokenized: {failure.reason}"
            )
        except (TypeError, ValueError) as failure:
            yield make_error(f"{method} returned a message that is not JSON: {failure}")


def _get_part_texts(content: object) -> list[str] | None:
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return None
    return [part["text"] for part in content if isinstance(part.get("text"), str)]


def check_metrics(env: Any, metrics: Any) -> Iterator[Finding]:
    for name, value in metrics.items():
        if not isinstance(name, str):
            yield make_error(f"get_metrics returned a name that is not a string: {name!r}")
        if isinstance(value, Real) and not isinstance(value, bool) and not -float("inf") < float(value) < float("inf"):
            yield make_error(f"get_metrics returned {name} = {value}")
    outcome = metrics.get("outcome_reward", 0.0)
    if isinstance(outcome, bool) or not isinstance(outcome, Real):
        yield make_error(f"outcome_reward must be a number; got {outcome!r}")
    aggregate = getattr(env, "aggregate_metrics", None)
    if aggregate is None:
        return
    for episodes in ([], [metrics], [metrics, dict(metrics)]):
        numbers = aggregate(copy.deepcopy(episodes))
        wrong = [name for name, value in numbers.items() if not isinstance(value, Real)]
        if wrong:
            yield make_error(
                f"aggregate_metrics of {len(episodes)} episodes returned no number for {', '.join(map(str, wrong))}"
            )
