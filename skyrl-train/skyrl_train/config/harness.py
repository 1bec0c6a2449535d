"""Settings of a harness: an agent program that generates the trajectories."""

from dataclasses import dataclass, field
from typing import Literal

from skyrl_train.config.base import BaseConfig


@dataclass(kw_only=True)
class HarnessConfig(BaseConfig):
    """Agent program that generates the trajectories in place of `environment.env_class`. It speaks to the model by a
    base URL and a key, as to any provider, and knows nothing of training. Off unless `command` or `function` is set."""

    command: list[str] | None = None
    """Command line of the agent, run in the workspace once for each trajectory. `{task}` (the last message of the row's
    prompt), `{task_file}` (the path of a file with it), `{model}`, `{base_url}` and `{api_key}` are filled in; the
    environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `SKYRL_MODEL`,
    `SKYRL_TASK`, `SKYRL_MESSAGES` (JSON), and in `SKYRL_TASK_FILE` and `SKYRL_MESSAGES_FILE` the paths of files with
    them: texts over 128 KiB, which no variable holds, are in their file alone."""

    function: str | None = None
    """`package.module:function`, called with a `HarnessTask` in place of a command, in this process and without a
    sandbox of its own. What it returns is handed to the grader, or is the reward where there is none."""

    grader: str | None = None
    """`package.module:function` that returns the reward of a `HarnessTask` and the agent's output (a command's standard
    output, a function's result). null: the row's `grade` (`command`, and `files` written before it): 1 if its exit
    status is 0, else 0."""

    sandbox: Literal["local", "docker", "podman", "process"] = "local"
    """`local`: bubblewrap, in which nothing but the endpoint can be reached. `docker`, `podman`: as `local`, in a
    container of `image`. `process`: no isolation, for programs and models that you trust."""

    image: str | None = None
    """Image of the container (`docker`, `podman`), with `sh`, `prlimit` and Python 3. null: `python:3.12-slim`, or that
    of the environment variable SKYRL_GYM_SANDBOX_IMAGE."""

    pull: Literal["always", "missing", "never"] = "missing"
    """When that image is pulled: `always` (once in each process), if it is `missing`, or `never`."""

    visible: list[str] = field(default_factory=list)
    """Folders of this machine that commands in the sandbox can read, such as the agent's own Python environment."""

    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of commands."""

    deadline_seconds: float = 600.0
    """Time of one trajectory; a harness that takes longer is ended and has failed."""

    grade_seconds: float = 60.0
    """Time of grading one trajectory."""

    max_turns: int | None = 64
    """Requests of one trajectory that are answered. Further ones are refused (403), and what the agent has done by then
    is graded. null: any number."""

    max_tokens: int | None = None
    """Tokens that the model generates in one trajectory, all turns together; then as `max_turns`. null: any number."""

    max_parallel: int = 16
    """Harnesses that run at the same time."""

    memory_gb: float = 2.0
    """Memory of one harness with everything it started (address space and resident)."""

    sampling: Literal["trainer", "harness"] = "trainer"
    """Sampling of answers. `trainer`: by `generator.sampling_params`, whatever a request asks for (a temperature,
    penalties, biases, a seed). `harness`: as
    requests say; answers at another temperature than the trainer's then do not train."""

    @property
    def is_on(self) -> bool:
        """Whether a harness generates."""
        return self.command is not None or self.function is not None
