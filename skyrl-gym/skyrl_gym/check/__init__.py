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

    Every call is made in a thread of its own, as the trainer's are.

    Args:
        env: an id, a spec, a class or factory, or an environment that was made of one (a new one is made like it).
        prompts: tasks: `Example`s, dataset rows with a column `prompt`, or conversations. The environment's own
            `examples()` if not given.
        env_config: settings, on top of the examples' own.
        max_tasks: of the tasks given, how many are tried.
        seconds_per_call: deadline of one call; a longer one is an error.
        raise_on_error: False only reports.

    Raises:
        CheckError: there are errors, and `raise_on_error`.
        ValueError: there are no tasks to try.
        InfraError: a service that the environment needs does not work, so nothing can be said.
    """
    env_spec = spec_of(env)
    examples = tasks_of(env_spec, prompts, env_config)[:max_tasks]
    if not examples:
        raise ValueError(f"nothing to check {env_spec.id} with: give prompts, or define examples()")
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
