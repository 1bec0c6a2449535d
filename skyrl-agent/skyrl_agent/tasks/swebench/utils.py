"""`SWEBenchTask`: issues of real repositories, each in a separate container image.

Running the images requires Docker (or a remote runtime with it) and gigabytes of downloads. The tests run the steps on
small repositories, and names, patches and logs on the benchmarks' published rows.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.finish import NO_GIT_PATCH, get_ending
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, RuntimeSpec
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement, TaskRowError
from skyrl_agent.tasks.rows import parse_names
from skyrl_agent.tasks.swebench import harness, repository
from skyrl_agent.tasks.swebench.patches import list_changed_paths
from skyrl_agent.tasks.swebench.r2e_utils import (
    compute_passed_fraction,
    get_reward,
    parse_log_by_path,
    parse_log_pytest,
)
from skyrl_agent.tasks.swebench.sources import DEFAULT_PREFIX, REPOSITORY, Source, get_source
from skyrl_agent.tasks.tests_run import find_obstacles
from skyrl_agent.types import JsonObject, Message, TrajectoryResult

GIBIBYTE = 1 << 30
PREFIX_VARIABLE = "EVAL_DOCKER_IMAGE_PREFIX"
SYSTEM = "You are a software engineer at a shell, working in a repository that is checked out and installed."
USER = """The repository is in {folder}. An issue was reported:

<issue_description>
{issue}
</issue_description>

Change the repository so that the issue is resolved. Tests for it are written already and are not your concern: edit \
only files that are no tests. A good way to work:

1. Read the issue, and say in a sentence what should happen and what does.
2. Look around: find the code that it is about.
3. Reproduce the problem with a short script.
4. Find the cause before you change anything.
5. Make the smallest change that removes the cause.
6. Run your script again.
7. Think of other inputs that meet the same code, and try them.
8. Run the tests that exist for the files you changed, and remove your script.
9. Call the finish tool.
"""
RUN_R2E = """
for folder in /root/r2e_tests /r2e_tests; do [ -d "$folder" ] && [ ! -e r2e_tests ] && ln -s "$folder" r2e_tests; done
for script in /root/run_tests.sh run_tests.sh /run_tests.sh; do [ -f "$script" ] && exec bash "$script"; done
exit 97
"""
NO_SCRIPT = 97
COLLECTION = "collection of "
"""Begin of the name of an obstacle."""


class SWEBenchTask(BaseTask):
    """Rows of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym, distinguished by `data_source`. Reward 1 if the issue's tests
    pass in a fresh runtime with the agent's patch, else 0.

    Grading: R2E-Gym by its script and `expected_output_json`; otherwise by the packages `swebench` or `swegym`, if
    installed, else by pytest with FAIL_TO_PASS and PASS_TO_PASS, for repositories with pytest test names.

    Args:
        image_prefix: prefix of SWE-bench's and SWE-Gym's images; None: the environment variable
            EVAL_DOCKER_IMAGE_PREFIX, else `xingyaoww/`.
        command_seconds: timeout of a command of the agent.
        test_seconds: timeout of the tests.
        memory_bytes: of the container.
    """

    tools = ("bash", "str_replace_editor", "code_search", "finish")

    def __init__(
        self,
        image_prefix: str | None = None,
        command_seconds: float = 600.0,
        test_seconds: float = 1800.0,
        memory_bytes: int = 8 * GIBIBYTE,
    ) -> None:
        self.image_prefix = image_prefix or os.environ.get(PREFIX_VARIABLE, DEFAULT_PREFIX)
        self.test_seconds = test_seconds
        self.limits = Limits(
            wall_seconds=command_seconds,
            cpu_seconds=command_seconds,
            memory_bytes=memory_bytes,
            file_bytes=GIBIBYTE,
            workspace_bytes=8 * GIBIBYTE,
            processes=1024,
        )

    def source(self, instance: Instance) -> Source:
        return get_source(instance.data_source, instance.row, self.row_id(instance), self.image_prefix)

    def row_id(self, instance: Instance) -> str:
        return str(instance.row.get("instance_id") or instance.instance_id)

    def check_row(self, instance: Instance) -> None:
        row = instance.row
        if not row.get("problem_statement"):
            raise self._build_row_error(instance, "problem_statement", "must be the issue's text")
        if "swe-smith" in instance.data_source.lower() and not row.get("image_name"):
            raise self._build_row_error(instance, "image_name", "must name the image")
        kind = self.source(instance).kind
        if kind == "r2e-gym":
            if not row.get("expected_output_json"):
                raise self._build_row_error(instance, "expected_output_json", "must map tests to their outcomes")
            return
        if not parse_names(row.get("FAIL_TO_PASS")):
            raise self._build_row_error(instance, "FAIL_TO_PASS", "must name the tests that the solution makes pass")
        if kind != "swe-smith" and not row.get("test_patch"):
            raise self._build_row_error(instance, "test_patch", "must be the patch that adds the tests")
        if "::" not in parse_names(row["FAIL_TO_PASS"])[0] and harness.find_harness(kind) is None:
            package = harness.PACKAGES.get(kind, "swebench")
            raise ConfigError(
                f"row {self.row_id(instance)}: its tests do not have pytest names, so only the benchmark's own "
                f"package can grade it: pip install {package}, or remove rows of {row.get('repo')}"
            )

    def get_instruction(self, instance: Instance) -> list[Message]:
        text = USER.format(folder=REPOSITORY, issue=str(instance.row["problem_statement"]).strip())
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

    def runtime_spec(self, instance: Instance) -> RuntimeSpec:
        source = self.source(instance)
        env = {"PATH": source.path, "SWE_INSTANCE_ID": self.row_id(instance), "PIP_CACHE_DIR": "/tmp/pip"}
        return RuntimeSpec(image=source.image, workdir=REPOSITORY, env=env, limits=self.limits)

    evaluation_runtime_spec = runtime_spec

    async def initialize_runtime(self, instance: Instance, runtime: Runtime) -> None:
        if self.source(instance).kind == "r2e-gym":
            await repository.remove_tests(runtime)
        await self._prepare(instance, runtime)

    async def complete_runtime(self, instance: Instance, runtime: Runtime, result: object) -> JsonObject:
        return {"git_patch": await repository.get_patch(runtime), "answer": result}

    async def evaluate_result(
        self, result: Any, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        assert runtime is not None, "the caller must start evaluation_runtime_spec"
        patch = result["git_patch"] if result else ""
        if not patch.strip():
            # A truncated agent had no time for a patch: its finish reason is kept.
            ended = get_ending(trajectory.finish_reason).trains
            return Judgement(0.0, {"resolved": 0.0}, NO_GIT_PATCH if ended else None)
        return await self._grade(instance, runtime, patch)

    def solution(self, instance: Instance) -> JsonObject | None:
        """Return the `patch` of SWE-bench and SWE-Gym. (SWE-smith's introduces the bug.)"""
        known = self.source(instance).kind not in ("r2e-gym", "swe-smith") and instance.row.get("patch")
        return {"git_patch": instance.row["patch"]} if known else None

    async def evaluate_original(self, instance: Instance, runtime: Runtime) -> Judgement:
        judgement = await self._grade(instance, runtime, "")
        # Tests of an issue often import code that exists only after the fix, so a missing import counts against the
        # patch.
        kept = {name: why for name, why in judgement.not_run.items() if not name.startswith(COLLECTION)}
        return replace(judgement, not_run=kept)

    async def _grade(self, instance: Instance, runtime: Runtime, patch: str) -> Judgement:
        await self._prepare(instance, runtime)
        if patch:
            await repository.apply_patch(runtime, patch)
        kind = self.source(instance).kind
        if kind == "r2e-gym":
            return await self._grade_r2e(instance, runtime)
        package = None if kind == "swe-smith" else harness.find_harness(kind)
        if package is not None:
            return await self._grade_by_harness(package, instance, runtime, patch)
        return await self._grade_by_pytest(instance, runtime, patch)

    async def _prepare(self, instance: Instance, runtime: Runtime) -> None:
        kind = self.source(instance).kind
        branch = self.row_id(instance) if kind == "swe-smith" else None
        await repository.prepare(runtime, checkout=branch, clean=kind != "r2e-gym")
        if runtime.spec.kind != "local":
            await self._check_interpreter(runtime)

    async def _check_interpreter(self, runtime: Runtime) -> None:
        found = (await runtime.exec("command -v python")).stdout.strip()
        if "testbed" not in found and "/root/.venv" not in found:
            raise InfraError(
                f"image {runtime.spec.image}: python is {found!r}, not the one of the repository's packages"
            )

    async def _grade_r2e(self, instance: Instance, runtime: Runtime) -> Judgement:
        done = await self._run(runtime, RUN_R2E)
        if done.returncode == NO_SCRIPT:
            raise InfraError(f"image {runtime.spec.image} has no run_tests.sh")
        outcomes = parse_log_pytest(done.stdout)
        return _build_judgement(
            get_reward(outcomes, instance.row), not_run={} if outcomes else _find_missing_outcome(done, RUN_R2E)
        )

    async def _grade_by_harness(self, package: str, instance: Instance, runtime: Runtime, patch: str) -> Judgement:
        spec = harness.make_test_spec(package, instance.row)
        done = await self._run(runtime, spec.eval_script)
        report = harness.build_report(package, spec, self.row_id(instance), patch, done.stdout)
        parts = {
            part.lower(): len(tests["success"]) / max(1, len(tests["success"]) + len(tests["failure"]))
            for part, tests in report.get("tests_status", {}).items()
            if part in ("FAIL_TO_PASS", "PASS_TO_PASS")
        }
        not_run = {} if report.get("tests_status") else _find_missing_outcome(done, spec.eval_script)
        return _build_judgement(float(report["resolved"]), parts, not_run)

    async def _grade_by_pytest(self, instance: Instance, runtime: Runtime, patch: str) -> Judgement:
        row = instance.row
        fail_to_pass, pass_to_pass = parse_names(row["FAIL_TO_PASS"]), parse_names(row.get("PASS_TO_PASS"))
        if test_patch := row.get("test_patch"):
            files = list_changed_paths(test_patch)
            await repository.restore(runtime, "HEAD", files)
            await repository.apply_patch(runtime, test_patch)
        else:  # SWE-smith: the last commit removed the tests
            files = sorted({name.partition("::")[0] for name in [*fail_to_pass, *pass_to_pass]})
            await repository.restore(runtime, f"{repository.BASE}~2", files)
        tests = " ".join(shlex.quote(path) for path in files if path.endswith(".py"))
        command = f"python -m pytest -rA -p no:cacheprovider --color=no {tests}"
        done = await self._run(runtime, command)
        outcomes = parse_log_by_path(done.stdout)
        parts = {
            "fail_to_pass": compute_passed_fraction(outcomes, fail_to_pass),
            "pass_to_pass": compute_passed_fraction(outcomes, pass_to_pass),
        }
        named = [*fail_to_pass, *pass_to_pass]
        resolved = all(part == 1.0 for part in parts.values())
        is_settled = resolved or (patch and any(outcomes.get(name) in ("FAILED", "ERROR") for name in named))
        not_run = {} if is_settled else _find_tests_not_run(done, command, outcomes, named)
        return _build_judgement(float(resolved), parts, not_run)

    async def _run(self, runtime: Runtime, script: str) -> ExecResult:
        """Run a script with stderr merged into stdout, in order."""
        limits = replace(self.limits, wall_seconds=self.test_seconds, cpu_seconds=self.test_seconds)
        limits = replace(limits, output_bytes=repository.MAX_PATCH_BYTES)
        return await runtime.exec(["bash", "-c", 'exec bash -c "$0" 2>&1', script], limits=limits)

    def _build_row_error(self, instance: Instance, field: str, rule: str) -> TaskRowError:
        got = instance.row.get(field)
        return TaskRowError(f"SWEBenchTask, row {self.row_id(instance)}: {field} {rule}; got {got!r:.200}")


def _build_judgement(
    resolved: float, parts: dict[str, float] | None = None, not_run: dict[str, str] | None = None
) -> Judgement:
    return Judgement(resolved, {"resolved": resolved, **(parts or {})}, not_run=not_run or {})


def _find_missing_outcome(done: ExecResult, script: str) -> dict[str, str]:
    """Return the obstacles of a script whose log reports no test; empty if it was killed, which an agent can cause."""
    if done.outcome != "exited":
        return {}
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    return find_obstacles(done, script) or {"log of the tests": f"no outcome of a test; last line: {last[:300]!r}"}


def _find_tests_not_run(
    done: ExecResult, command: str, outcomes: Mapping[str, str], named: Sequence[str]
) -> dict[str, str]:
    """Return the tests that did not run, with the obstacle; see `local_swe.find_tests_not_run`."""
    if done.outcome != "exited":
        return {}
    broken = [name for name, outcome in outcomes.items() if outcome == "ERROR" and "::" not in name]
    if broken:
        return {f"{COLLECTION}{name}": "it could not be imported" for name in broken}
    missing = {f"test {name}": "it is not in the log" for name in named if name not in outcomes}
    return find_obstacles(done, command) or missing
