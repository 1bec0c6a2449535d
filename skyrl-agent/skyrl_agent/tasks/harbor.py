"""Task folders of Harbor (https://harborframework.com/docs/tasks) and of Terminal-Bench before it, in any runtime.

    harbor            terminal-bench
    task.toml         task.yaml           limits; the latter also has the instruction
    instruction.md                        the instruction
    environment/      .                   Dockerfile and the files that it copies
    tests/test.sh     run-tests.sh        judge; tests/ is `/tests` while it runs, and not before
    solution/solve.sh solution.sh         oracle

Of the Dockerfile a runtime follows WORKDIR, COPY, ADD, ENV, ARG and RUN, without network. The image of FROM is this
machine or, with `containers`, that image; an image of `environment.docker_image` then needs none of these steps. A RUN
that fails here is an InfraError, never a reward of 0.

    python -m skyrl_agent.tasks.harbor FOLDER --output rows.jsonl      # rows of the task folders in a folder
    python -m skyrl_agent.validate harbor.yaml rows.jsonl              # oracles must pass, idle agents fail
"""

import argparse
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, RuntimeSpec
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement, TaskRowError
from skyrl_agent.types import JsonObject, Message, Row, TrajectoryResult
from skyrl_gym.sandbox.environment import check_variables
from skyrl_gym.sandbox.rlimits import PATH

SYSTEM = "You work at a shell, in small steps: run a command, read what it says, go on. There is no network."
PLACE = "/tmp/harbor"
"""Folder of what is not the agent's work; `/tests`, `/logs` and `/solution` are links to folders in it."""
STAGED = ".harbor-files"
"""Folder of files on their way, in the working directory."""
FOLDERS = ("tests", "logs", "solution")
DEFAULT_SECONDS = 600.0
FIRST_SECONDS = 60.0
MAX_REWARD_BYTES = 1 << 16
FILES_AT_A_TIME = 25
"""Files put in place by one command, whose length is limited to 128 KiB; a path may have 4 KiB."""
FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.MULTILINE | re.IGNORECASE)
ARG = re.compile(r"^\s*ARG\s+(\w+)=[\"']?([^\s\"']+)", re.MULTILINE | re.IGNORECASE)
CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
SKIPPED = (
    "FROM",
    "CMD",
    "ENTRYPOINT",
    "LABEL",
    "EXPOSE",
    "MAINTAINER",
    "SHELL",
    "USER",
    "VOLUME",
    "HEALTHCHECK",
)
"""Instructions of Dockerfiles that say nothing about files."""


@dataclass(frozen=True)
class TaskFolder:
    """Content of a task folder."""

    path: Path
    instruction: str
    test: str
    """Path of the judge's script in the folder; `solution` likewise."""
    solution: str
    dockerfile: str
    agent_seconds: float
    test_seconds: float
    test_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    docker_image: str | None = None
    """Image in which the Dockerfile's steps are done already."""
    needs_reward_file: bool = True
    """The judge writes its reward; that of Terminal-Bench exits with 0."""

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of a subfolder by relative path. The path of a file returns that file."""
        root = self.path / part
        if root.is_file():
            return {root.name: root.read_bytes()}
        return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def read_folder(path: Path) -> TaskFolder:
    """Raises TaskRowError that names the file which is missing or wrong."""
    try:
        if (path / "task.toml").is_file():
            return _read_harbor(path, tomllib.loads((path / "task.toml").read_text()))
        if (path / "task.yaml").is_file():
            return _read_terminal_bench(path, yaml.safe_load((path / "task.yaml").read_text()))
    except (OSError, ValueError, yaml.YAMLError, AttributeError) as mistake:
        raise TaskRowError(f"task folder {path}: {type(mistake).__name__}: {mistake}") from mistake
    raise TaskRowError(f"task folder {path} has neither task.toml (Harbor) nor task.yaml (Terminal-Bench)")


def _read_harbor(path: Path, config: Mapping[str, Any]) -> TaskFolder:
    if config.get("steps"):
        raise TaskRowError(f"task folder {path}: tasks of several [[steps]] are not supported; split it into tasks")
    if not (path / "tests" / "test.sh").is_file():
        raise TaskRowError(f"task folder {path} has no tests/test.sh to grade it")
    verifier, agent = config.get("verifier", {}), config.get("agent", {})
    return TaskFolder(
        path=path,
        instruction=(path / "instruction.md").read_text().strip(),
        test="tests/test.sh",
        solution="solution/solve.sh",
        dockerfile="environment/Dockerfile",
        agent_seconds=float(agent.get("timeout_sec") or DEFAULT_SECONDS),
        test_seconds=float(verifier.get("timeout_sec") or DEFAULT_SECONDS),
        test_env=_parse_env(path, verifier),
        solution_env=_parse_env(path, config.get("solution", {})),
        docker_image=config.get("environment", {}).get("docker_image"),
    )


def _parse_env(path: Path, section: Mapping[str, Any]) -> dict[str, str]:
    env = {name: str(value) for name, value in (section.get("env") or {}).items()}
    for name, value in env.items():
        if value.startswith("${"):
            raise TaskRowError(f"task folder {path}: env {name}={value} is a variable of the host; set it in the file")
    try:
        check_variables(env)
    except ValueError as error:
        raise TaskRowError(f"task folder {path}: {error}") from None
    return env


def _read_terminal_bench(path: Path, config: Mapping[str, Any]) -> TaskFolder:
    if not (path / "run-tests.sh").is_file():
        raise TaskRowError(f"task folder {path} has no run-tests.sh to grade it")
    return TaskFolder(
        path=path,
        instruction=str(config.get("instruction") or "").strip(),
        test="run-tests.sh",
        solution="solution.sh",
        dockerfile="Dockerfile",
        agent_seconds=float(config.get("max_agent_timeout_sec") or DEFAULT_SECONDS),
        test_seconds=float(config.get("max_test_timeout_sec") or DEFAULT_SECONDS),
        test_env={"TEST_DIR": "/tests"},
        needs_reward_file=False,
    )


def iter_harbor_rows(folder: Path) -> Iterator[JsonObject]:
    """Yield a row per task folder of a folder, sorted by name. Raises TaskRowError, also for an empty folder."""
    paths = [
        path for path in sorted(folder.iterdir()) if (path / "task.toml").is_file() or (path / "task.yaml").is_file()
    ]
    if not paths:
        raise TaskRowError(f"{folder} contains no task folder (task.toml or task.yaml)")
    for path in paths:
        row: JsonObject = {"id": path.name, "data_source": f"harbor/{folder.name}", "path": str(path.resolve())}
        task = HarborTask()
        instance = Instance(row, path.name)
        task.check_row(instance)
        yield row | {"prompt": task.get_instruction(instance)}


class HarborTask(BaseTask):
    """Task graded by its folder's test script. A row has `path`, the task folder.

    The script writes `/logs/verifier/reward.txt`, a number, or `reward.json`, an object of numbers: the reward is
    `reward` or the only number, and all are reward parts. Without either file there is no reward.

    Args:
        memory_bytes: of each command.
        containers: run each task in a container of `environment.docker_image`, or of the Dockerfile's FROM image with
            the other steps applied.
    """

    tools = ("bash", "finish")

    def __init__(self, memory_bytes: int = 2 << 30, containers: bool = False) -> None:
        self.memory_bytes = memory_bytes
        self.containers = containers

    def check_row(self, instance: Instance) -> None:
        folder = _folder(instance.row)
        if not folder.instruction:
            raise TaskRowError(f"task folder {folder.path} has no instruction")
        self._list_steps(folder)
        if self.containers:
            get_image(folder)

    def get_instruction(self, instance: Instance) -> list[Message]:
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": _folder(instance.row).instruction},
        ]

    def runtime_spec(self, instance: Instance) -> RuntimeSpec:
        folder = _folder(instance.row)
        seconds = folder.agent_seconds
        env, workdir = {}, None
        for kind, value in self._list_steps(folder):
            if kind == "ENV":
                env |= value
            elif kind == "WORKDIR":
                workdir = value
        limits = Limits(wall_seconds=seconds, cpu_seconds=seconds, memory_bytes=self.memory_bytes)
        if self.containers:
            return RuntimeSpec(image=get_image(folder), workdir=workdir, env=env, limits=limits)
        links = {f"/{name}": f"{PLACE}/{name}" for name in FOLDERS} | {"/app": "/workspace"}
        if workdir not in (None, "/", "/workspace", "/tmp") and Path(workdir).parent == Path("/"):
            links[workdir] = "/workspace"
        return RuntimeSpec(env=env, links=links, limits=limits)

    async def initialize_runtime(self, instance: Instance, runtime: Runtime) -> None:
        """Create the folders and apply the Dockerfile's steps. Raises InfraError."""
        folder = _folder(instance.row)
        places = " ".join(f"{PLACE}/{name}" for name in FOLDERS)
        # A container has no links yet, and its root may create them.
        link = "; ".join(f"[ -e /{name} ] || ln -s {PLACE}/{name} /{name}" for name in FOLDERS)
        await _run(runtime, f"mkdir -p {places} {PLACE}/logs/verifier {PLACE}/logs/agent; {link}")
        workdir = runtime.workdir if self.containers else "/app"
        for kind, value in self._list_steps(folder):
            if kind == "WORKDIR":
                workdir = value
                await _run(runtime, f"mkdir -p {shlex.quote(workdir)}")
            elif kind == "RUN":
                await _run(runtime, f"cd {shlex.quote(workdir)} && ({value}\n)")
            elif kind == "COPY":
                await self._copy(folder, value, workdir, runtime)

    def _list_steps(self, folder: TaskFolder) -> list[tuple[str, Any]]:
        if self.containers:
            return [] if folder.docker_image else parse_dockerfile(folder, CONTAINER_PATH)
        return parse_dockerfile(folder)

    async def _copy(self, folder: TaskFolder, arguments: list[str], workdir: str, runtime: Runtime) -> None:
        *sources, target = arguments
        root = str(Path(folder.dockerfile).parent)
        place = target if target.startswith("/") else f"{workdir}/{target}"
        for source in sources:
            into = place
            files = folder.files(f"{root}/{source}")
            if not files:
                raise TaskRowError(
                    f"task folder {folder.path}: {folder.dockerfile} copies {source}, which does not exist"
                )
            if (folder.path / root / source).is_file() and not target.endswith(("/", ".")) and len(sources) == 1:
                files = {Path(place).name: next(iter(files.values()))}
                into = str(Path(place).parent)
            await _write_files(runtime, files, into)

    async def complete_runtime(self, instance: Instance, runtime: Runtime, result: Any) -> JsonObject:
        """Run the grading script in the agent's runtime."""
        folder = _folder(instance.row)
        # Only now, and into empty folders: an agent must neither read the tests nor forge a reward.
        await _run(runtime, f"rm -rf {PLACE}/tests {PLACE}/logs/verifier; mkdir -p {PLACE}/tests {PLACE}/logs/verifier")
        await _write_files(runtime, folder.files("tests"), f"{PLACE}/tests")
        if not folder.needs_reward_file:
            await _write_files(runtime, folder.files(folder.test), f"{PLACE}/tests")
        script = f"/tests/{Path(folder.test).name}"
        done = await runtime.exec(["bash", script], env=folder.test_env, timeout=folder.test_seconds)
        said = (done.stderr or done.stdout).strip()[-500:]
        if not folder.needs_reward_file:
            return {"rewards": {"reward": float(done.ok)}, "said": said}
        return {"rewards": await _read_rewards(folder, runtime, done), "said": said}

    async def evaluate_result(
        self, result: Any, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        if "rewards" not in result:  # `solution`
            assert runtime is not None, "the caller must start runtime_spec"
            await self.initialize_runtime(instance, runtime)
            await self.run_solution(instance, runtime)
            result = await self.complete_runtime(instance, runtime, None)
        rewards = result["rewards"]
        name = "reward" if "reward" in rewards else next(iter(rewards))
        return Judgement(rewards[name], rewards)

    def solution(self, instance: Instance) -> JsonObject | None:
        folder = _folder(instance.row)
        return {"solution": folder.solution} if (folder.path / folder.solution).is_file() else None

    async def run_solution(self, instance: Instance, runtime: Runtime) -> None:
        """Run the folder's oracle solution in a prepared runtime. A failing script is graded by the tests."""
        folder = _folder(instance.row)
        parent = str(Path(folder.solution).parent)
        await _write_files(runtime, folder.files(folder.solution if parent == "." else parent), f"{PLACE}/solution")
        script = f"/solution/{Path(folder.solution).name}"
        await runtime.exec(["bash", script], env=folder.solution_env, timeout=folder.agent_seconds)

    async def evaluate_original(self, instance: Instance, runtime: Runtime) -> Judgement:
        await self.initialize_runtime(instance, runtime)
        result = await self.complete_runtime(instance, runtime, None)
        return await self.evaluate_result(result, instance, TrajectoryResult(), runtime)


async def _read_rewards(folder: TaskFolder, runtime: Runtime, done: ExecResult) -> dict[str, float]:
    """Read the rewards written by the grading script. Raises InfraError if they are missing or unreadable."""
    logs = f"{PLACE}/logs/verifier"
    said = f"{done.outcome}, return code {done.returncode}, {(done.stderr or done.stdout).strip()[-300:]!r}"
    for name, read in (("reward.json", _parse_numbers), ("reward.txt", lambda text: {"reward": float(text)})):
        found = await runtime.exec(f"[ -f {logs}/{name} ] && head -c {MAX_REWARD_BYTES} {logs}/{name}")
        if found.ok:
            try:
                rewards = read(found.stdout)
            except ValueError as mistake:
                raise InfraError(f"task folder {folder.path}: {name}: {mistake}; the grader: {said}") from None
            if all(math.isfinite(value) for value in rewards.values()):
                return rewards
    raise InfraError(f"task folder {folder.path}: {folder.test} wrote no finite reward to /logs/verifier: {said}")


def _parse_numbers(text: str) -> dict[str, float]:
    values = json.loads(text)
    if not isinstance(values, dict) or not values or ("reward" not in values and len(values) > 1):
        raise ValueError(f"it must be an object with the number `reward`; got {text!r:.200}")
    try:
        return {str(name): float(value) for name, value in values.items()}
    except TypeError:
        raise ValueError(f"its values must be numbers; got {text!r:.200}") from None


def get_image(folder: TaskFolder) -> str:
    """Return the image of a task's container. Raises TaskRowError."""
    if folder.docker_image:
        return folder.docker_image
    file = folder.path / folder.dockerfile
    found = FROM.findall(file.read_text()) if file.is_file() else []
    if len(found) != 1:
        raise TaskRowError(
            f"task folder {folder.path}: {folder.dockerfile} must have exactly one FROM, the container's image, or "
            f"task.toml must set environment.docker_image; it has {len(found)}"
        )
    given = {name: value for name, value in ARG.findall(file.read_text().partition(found[0])[0])}
    image = VARIABLE.sub(lambda name: given.get(name[1] or name[2], name[0]), found[0])
    if "$" in image:
        raise TaskRowError(
            f"task folder {folder.path}: {folder.dockerfile} has FROM {found[0]}, whose variable has no value: set it "
            "by an ARG before, or set environment.docker_image in task.toml"
        )
    return image


def parse_dockerfile(folder: TaskFolder, path: str = PATH) -> list[tuple[str, Any]]:
    """Return the Dockerfile steps that a sandbox supports, as (`WORKDIR`, path), (`ENV`, mapping), (`RUN`, script),
    (`COPY`, arguments). A task without a Dockerfile has none. Raises TaskRowError.
    """
    file = folder.path / folder.dockerfile
    if not file.is_file():
        return []
    steps: list[tuple[str, Any]] = []
    workdir, known = "/", {"PATH": path}
    exports = ""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        kind, _, rest = line.strip().partition(" ")
        kind, rest = kind.upper(), rest.strip()
        if not kind or kind in SKIPPED:
            continue
        if kind != "RUN":  # the shell expands RUN
            rest = _render_variables(rest, known)
        if kind == "ARG":
            given = dict(word.split("=", 1) for word in shlex.split(rest) if "=" in word)
            known |= given
            exports += "".join(f"export {name}={shlex.quote(value)}; " for name, value in given.items())
        elif kind != "RUN" and "${" in rest:
            raise _build_unsupported_error(folder, line)
        elif kind == "WORKDIR":
            workdir = rest if rest.startswith("/") else f"{workdir.rstrip('/')}/{rest}"
            steps.append((kind, workdir))
        elif kind == "ENV":
            pairs = [word.partition("=") for word in shlex.split(rest)]
            pairs = pairs if all(sign for _, sign, _ in pairs) else [rest.partition(" ")]
            steps.append((kind, {name: value for name, _, value in pairs}))
            known |= steps[-1][1]
        elif kind == "RUN" and not rest.startswith(("[", "<<", "--mount")):
            steps.append((kind, exports + rest))
        elif kind in ("COPY", "ADD") and "--from" not in rest and "://" not in rest and not rest.startswith("["):
            steps.append(("COPY", [word for word in shlex.split(rest) if not word.startswith("--")]))
        else:
            raise _build_unsupported_error(folder, line)
    return steps


def _render_variables(text: str, values: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: values.get(found[1] or found[2], ""), text)


def _build_unsupported_error(folder: TaskFolder, line: str) -> TaskRowError:
    return TaskRowError(
        f"task folder {folder.path}: {folder.dockerfile} has {line.strip()!r:.120}, which is not supported in a sandbox"
    )


def _folder(row: Row) -> TaskFolder:
    if not row.get("path"):
        raise TaskRowError("path must be a task folder; the row has none")
    return read_folder(Path(str(row["path"])))


async def _write_files(runtime: Runtime, files: Mapping[str, bytes], place: str) -> None:
    """Write files into a folder of the runtime. Scripts (`#!`) are executable."""
    named = list(files.items())
    for first in range(0, len(named), FILES_AT_A_TIME):
        commands = []
        for number, (name, content) in enumerate(named[first : first + FILES_AT_A_TIME]):
            await runtime.write(f"{STAGED}/{number}", content)
            mode = "755" if content.startswith(b"#!") else "644"
            commands.append(f"install -D -m {mode} {STAGED}/{number} {shlex.quote(f'{place}/{name}')}")
        await _run(runtime, " && ".join([*commands, f"rm -r {STAGED}"]))


async def _run(runtime: Runtime, command: str) -> None:
    done = await runtime.exec(command, timeout=FIRST_SECONDS)
    if not done.ok:
        raise InfraError(
            f"{command!r:.200} failed: {done.outcome}, return code {done.returncode}, "
            f"{(done.stderr or done.stdout).strip()[-300:]!r}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_agent.tasks.harbor", description="Write dataset rows for the task folders in a folder."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="file to write: .jsonl")
    arguments = parser.parse_args()
    try:
        rows = list(iter_harbor_rows(arguments.folder))
    except (TaskRowError, OSError) as mistake:
        parser.error(str(mistake))
    arguments.output.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} rows in {arguments.output}")


if __name__ == "__main__":
    main()
