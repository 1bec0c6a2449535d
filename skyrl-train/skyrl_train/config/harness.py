"""Settings of an agent harness: an agent program that generates the trajectories."""

from dataclasses import dataclass, field
from typing import Literal

from skyrl_train.config.base import BaseConfig


@dataclass(kw_only=True)
class HarnessConfig(BaseConfig):
    """Agent harness that generates the trajectories instead of `environment.env_class`. It accesses the model through a
    base URL and a key, as with any provider, and needs no knowledge of training. Off unless `command` or `function` is
    set."""

    command: list[str] | None = None
    """Command line of the agent, run in the workspace once per trajectory, with `{task}` (the last message of the row's
    prompt), `{task_file}`, `{model}`, `{base_url}` and `{api_key}` filled in. Environment variables: `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `SKYRL_MODEL`, `SKYRL_TASK`, `SKYRL_MESSAGES` (JSON),
    and `SKYRL_TASK_FILE` and `SKYRL_MESSAGES_FILE`, paths of files with the last two (texts over 128 KiB are in the
    file only)."""

    function: str | None = None
    """`package.module:function`, called with a `HarnessTask` instead of a command, in this process and without a
    sandbox. Its result is passed to the grader, or is the reward without a grader."""

    grader: str | None = None
    """`package.module:function` that returns the reward of a `HarnessTask` and the agent's output (a command's standard
    output, a function's result). null: the row's `grade` (`command`, and `files` written before it): 1 if its exit
    status is 0, else 0."""

    sandbox: Literal["local", "docker", "podman", "process"] = "local"
    """`local`: bubblewrap; only the endpoint is reachable. `docker`, `podman`: as `local`, in a container of `image`.
    `process`: no isolation, for trusted programs and models."""

    image: str | None = None
    """Image of the container (`docker`, `podman`), with `sh`, `prlimit` and Python 3. null: the environment variable
    SKYRL_GYM_SANDBOX_IMAGE, else `python:3.12-slim`."""

    pull: Literal["always", "missing", "never"] = "missing"
    """Pull policy of the image: `always` (once per process), `missing` or `never`."""

    visible: list[str] = field(default_factory=list)
    """Folders of this machine that sandboxed commands can read, such as the agent's Python environment."""

    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of commands."""

    deadline_seconds: float = 600.0
    """Timeout of one trajectory, in seconds; the trajectory then fails."""

    grade_seconds: float = 60.0
    """Timeout of grading one trajectory, in seconds."""

    max_turns: int | None = 64
    """Maximum number of requests of one trajectory. Further ones are rejected (403), and the state reached so far is
    graded. null: no limit."""

    max_tokens: int | None = None
    """Maximum number of generated tokens of one trajectory, over all turns; then as `max_turns`. null: no limit."""

    max_parallel: int = 16
    """Maximum number of concurrent harnesses."""

    memory_gb: float = 2.0
    """Memory limit (GB) of one harness and all processes that it starts (address space and resident)."""

    sampling: Literal["trainer", "harness"] = "trainer"
    """Sampling parameters. `trainer`: `generator.sampling_params`; parameters in requests (temperature, penalties,
    biases, seed) are ignored. `harness`: parameters of the requests; completions at another temperature than the
    trainer's are then not trained."""

    @property
    def is_on(self) -> bool:
        """Whether a harness generates the trajectories."""
        return self.command is not None or self.function is not None
