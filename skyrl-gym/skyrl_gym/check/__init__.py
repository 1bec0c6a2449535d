"""Conformance check of environments: `check_env` tries one as a trainer, a hostile model and a bad dataset would.

From a shell: `python -m skyrl_gym.check ENV`.
"""

from collections.abc import Callable, Mapping, Sequence

from skyrl_gym.check.hostile import HOSTILE_ACTIONS
from skyrl_gym.check.promises import PROMISES, run_promise
from skyrl_gym.check.report import CheckError, CheckReport, Finding
from skyrl_gym.check.subject import Subject, examples_of, spec_of, tasks_of
from skyrl_gym.core import Env
from skyrl_gym.envs.base_text_env import ConversationType, Example
from skyrl_gym.envs.registration import EnvSpec

__all__ = ["HOSTILE_ACTIONS", "CheckError", "CheckReport", "Finding", "check_env", "examples_of", "spec_of"]


def check_env(
    env: str | EnvSpec | Env | Callable[..., Env],
    prompts: Sequence[Example | Mapping[str, object] | ConversationType] | None = None,
    *,
    env_config: Mapping[str, object] | None = None,
    max_tasks: int = 4,
    seconds_per_call: float = 30.0,
    raise_on_error: bool = True,
) -> CheckReport:
    """Check types, done and turns, closing, determinism under a seed, isolation of instances, rows left as they were,
    messages that serialise and tokenise, metrics, hostile actions, incomplete rows, and time.

    Every call runs in a separate thread, as in the trainer.

    Args:
        env: an id, a spec, a class or factory, or an environment made from one (instances are created with its spec).
        prompts: tasks: `Example`s, dataset rows with a column `prompt`, or conversations. Default: the `examples()` of
            the environment.
        env_config: settings that override the settings of the examples.
        max_tasks: maximum number of tasks to check.
        seconds_per_call: deadline of one call; a longer one is an error.
        raise_on_error: False only reports.

    Raises:
        CheckError: errors were found, and `raise_on_error`.
        ValueError: the task list is empty.
        InfraError: a required service does not work, so there is no result.
    """
    env_spec = spec_of(env)
    examples = tasks_of(env_spec, prompts, env_config)[:max_tasks]
    if not examples:
        raise ValueError(f"no prompts to check {env_spec.id} with: pass prompts, or define examples()")
    subject = Subject(env_spec, examples, seconds_per_call)
    findings = []
    for name, check in PROMISES.items():
        for finding in run_promise(name, check, subject):
            if finding not in findings:
                findings.append(finding)
    report = CheckReport(env_spec.id, findings, len(examples), subject.slowest())
    if raise_on_error and not report.ok:
        raise CheckError(report)
    return report
