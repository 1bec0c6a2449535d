"""Dataset rows of the tasks of an environment of verifiers."""

import itertools
import json
from collections.abc import Iterator

from skyrl_gym.error import TaskError
from skyrl_gym.hubs.verifiers.host import environment_of, load

ENV_CLASS = "skyrl_gym.hubs.verifiers:VerifiersEnv"


def verifiers_rows(environment: object, size: int | None = None, start: int = 0) -> Iterator[dict[str, object]]:
    """Yield a row for each task from `start` on, `size` at most.

    Args:
        environment: the id of a taskset, or verifiers' settings of an environment: a mapping or its JSON text.
        size: required for infinite tasksets.
        start: position of the first task; training and validation take different ones.

    Raises:
        Error: verifiers is not installed, or the taskset is unknown.
        TaskError: the taskset is infinite and `size` is not given.
    """
    settings = environment_of(environment)
    taskset = load(settings).taskset
    if size is None and not taskset.bounded:
        raise TaskError(f"size is required: {type(taskset).__name__} is infinite")
    stop = None if size is None else start + size
    for index, task in enumerate(itertools.islice(taskset, start, stop), start):
        yield {
            "data_source": f"verifiers/{settings['taskset']['id']}",
            "prompt": _prompt(task.data),
            "env_class": ENV_CLASS,
            "environment": json.dumps(settings, sort_keys=True),
            "index": index,
        }


def _prompt(data: object) -> list[dict[str, object]]:
    """Return the task's messages; they only tell how long the prompt is, as `init` returns the real ones."""
    prompt = getattr(data, "prompt", None)
    texts = [("system", getattr(data, "system_prompt", None)), ("user", prompt if isinstance(prompt, str) else None)]
    messages: list[dict[str, object]] = [{"role": role, "content": text} for role, text in texts if text]
    if isinstance(prompt, list):
        messages += [{"role": message.role, "content": str(message.content)} for message in prompt]
    return (
        messages
        if any(message["role"] == "user" for message in messages)
        else [
            *messages,
            {"role": "user", "content": str(getattr(data, "name", None) or "(the environment opens the conversation)")},
        ]
    )
