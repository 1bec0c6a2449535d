"""A task file: YAML in, typed values out. The one home of every key, its meaning and its default."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from skyrl_agent.errors import ConfigError
from skyrl_agent.types import JsonObject
from skyrl_gym.suggestions import did_you_mean


class Section(BaseModel):
    """Base class of sections: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DataSection(Section):
    """Dotted paths of the fields of a dataset row."""

    instance_key: str | None = None
    """Part of the row passed to the task. None: the whole row."""
    instance_id_key: str | None = None
    """Unique name of the instance. None: the row's position in the batch."""
    data_source_key: str | None = None
    """Name of the data set, by which tasks choose the kind of a row and metrics are grouped. None: `default`."""


class GeneratorValSection(Section):
    """Settings of evaluation batches; missing ones are as in training."""

    num_trajectories: int | None = Field(default=None, ge=1)
    """Trajectories per instance."""
    sampling_params: JsonObject | None = None
    """Values that override those of `generator.sampling_params`."""


class GeneratorSection(Section):
    """Settings of the model and of the agent loop."""

    infer_backend: str = "skyrl-train"
    """Model backend: `skyrl-train`, `tinker`, `openai_server`, or a name registered with `register_backend`.
    Trainers use their own, whatever is set here."""
    backend_config: JsonObject = Field(default_factory=dict)
    """Arguments of that backend."""
    num_trajectories: int = Field(default=1, ge=1)
    """Trajectories per instance: the group size. Must equal the trainer's `n_samples_per_prompt`."""
    max_iterations: int = Field(default=5, ge=1)
    """Maximum number of steps of an agent. A step is one response of the model and the tool calls in it."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Maximum number of tokens after the initial prompt, the model's and the tools' together."""
    max_context_length: int | None = Field(default=None, ge=2)
    """Maximum number of tokens that the model reads and generates in one turn, including the prompt. None: not limited
    here."""
    sampling_params: JsonObject = Field(default_factory=dict)
    """Sampling parameters passed to the backend. `max_tokens` limits one turn (and is reduced to the remaining
    budget).
    """
    val_config: GeneratorValSection = GeneratorValSection()
    remove_think_tokens: bool = False
    """Remove the reasoning of earlier turns from the model's input. Each turn is then a training row of its own."""
    vision_is_active: Literal[False] = False
    """Images are not supported yet."""
    qwen3_enable_thinking: bool = True
    """Value of `enable_thinking` for the chat template."""
    qwen3_acc_thinking: bool = False
    """Keep the reasoning of earlier turns in the model's input, with the template `qwen3_acc_thinking`."""
    append_only: bool = False
    """Only append to what the model has read and written, whatever the chat template would drop or rewrite: a
    trajectory is one training row, and the model reads its thoughts of earlier turns."""
    chat_template: str | None = None
    """Path of a Jinja template to use in place of the tokenizer's."""
    tool_format: Literal[
        "function_xml",
        "hermes",
        "llama3_json",
        "gpt_oss",
        "deepseek",
        "glm",
        "kimi",
        "mistral",
        "minimax",
        "gemma",
    ] = "function_xml"
    """Format of tool calls. `function_xml`: `<function=name>`, explained in the system message. The others are native
    formats of models, whose chat template is given the tools' schemas."""
    max_parallel_tool_calls: int = Field(default=1, ge=1)
    """Maximum number of tool calls per turn; they run concurrently, or one after another if they use the runtime.
    `function_xml` allows one."""
    tool_timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout of one tool call, in seconds; the model is told, and the trajectory continues."""
    max_tool_output_chars: int = Field(default=10_000, ge=200)
    """Maximum number of characters of a tool's output; a longer one is truncated in the middle, with a note."""
    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout of one request to the model, in seconds."""
    profile_tools: bool = False
    """Add counts of tool calls to `rollout_metrics`."""
    debug_log: bool = False
    """Log tool calls and the beginning of their outputs."""
    early_step_threshold: int = Field(default=0, ge=0)
    """Minimum number of steps that turn reminders ask for."""
    enable_turn_reminder: bool = False
    """Tell the model before each turn how many steps remain."""


class DispatcherValSection(Section):
    """Limits of evaluation batches; missing ones are as in training."""

    max_parallel_agents: int | None = Field(default=None, ge=1)
    """`dispatcher.max_parallel_agents` for evaluation batches."""
    max_eval_parallel_agents: int | None = Field(default=None, ge=1)
    """`dispatcher.max_eval_parallel_agents` for evaluation batches."""


class StageLimits(Section):
    """Limits of one stage; missing ones are set by the dispatcher's type."""

    parallel: int | None = Field(default=None, ge=1)
    """Maximum number of trajectories in the stage at a time; `auto` does not size a stage that has it."""
    queue: int | None = Field(default=None, ge=0)
    """Maximum number of trajectories that wait for the stage after completing the previous one."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Timeout of one attempt, in seconds."""
    retries: int | None = Field(default=None, ge=0)
    """Maximum number of retries after infrastructure failures."""


class DispatcherSection(Section):
    """Settings of the scheduler."""

    type: str = "async_pipeline"
    """`async_pipeline`, `auto` (a pipeline whose limits are found from measured stage times), `async_batch`,
    `async_batch_bounded`, `async_fix_pool`, or a registered one."""
    max_parallel_agents: int = Field(default=32, ge=1)
    """`async_pipeline`: maximum number of trajectories that initialize at a time, and of those that generate; `auto`
    begins with it. `async_batch_bounded`: maximum number of unfinished trajectories."""
    max_eval_parallel_agents: int = Field(default=32, ge=1)
    """`async_pipeline`: maximum number of trajectories that are evaluated at a time; `auto` begins with it."""
    max_alive: int | None = Field(default=None, ge=1)
    """`auto`, `async_pipeline`: maximum number of runtimes at a time, from initialization to the end of evaluation.
    None: not limited."""
    val_config: DispatcherValSection = DispatcherValSection()
    initialize: StageLimits = StageLimits()
    generate: StageLimits = StageLimits()
    evaluate: StageLimits = StageLimits()
    order: Literal["trajectories", "instances", "longest_first"] | None = None
    """Order of trajectories. `trajectories`: the first of every instance, then the second of each. `instances`: all of
    the first instance, then all of the second (for streaming). `longest_first`: as `trajectories` until ended
    trajectories of an instance (of an earlier batch, too, with `data.instance_id_key`) predict the others' work, then
    those with the most left. None: `longest_first` with `auto`, else `trajectories`."""
    num_environments: int | None = Field(default=None, ge=1)
    """Number of environments of `async_fix_pool`, which are created once and used by one trajectory at a time."""
    close_timeout_seconds: float = Field(default=30.0, gt=0)
    """Timeout of closing a trajectory's runtime, in seconds."""
    progress: bool = False
    """Show a live progress bar on standard error."""
    scheduler: str | None = None
    """Ignored; in task files of other releases."""


class RuntimeSection(Section):
    """Settings that override the runtime specification of the task."""

    kind: Literal["auto", "local", "docker", "podman", "remote"] | None = None
    """`local`: bubblewrap on this machine. `docker`, `podman`: a container. `remote`: a server of `python -m
    skyrl_agent.services.runtime`. `auto`: the first possible one of remote (with `url`), a container (with `image`) and
    local."""
    image: str | None = None
    """Image of containers. Refused with kind `local`."""
    pull: Literal["always", "missing", "never"] | None = None
    """When to pull the image: `always` (once in each process), if it is `missing` (default), or `never`."""
    user: str | None = None
    """User in a container on this machine, as `1000` or `1000:1000`; it has no capability. Default: the image's."""
    read_only: bool | None = None
    """Whether a container on this machine can write only its working directory (empty, in memory) and `/tmp`."""
    cpus: float | None = Field(default=None, gt=0)
    """Processors of a container on this machine."""
    url: str | None = None
    """URL of the remote server."""
    token_env: str | None = None
    """Environment variable that holds the remote server's token."""
    lease_seconds: float | None = Field(default=None, gt=0)
    """Time in seconds without a sign of life of its owner after which a runtime is removed."""
    command_timeout_seconds: float | None = Field(default=None, gt=0)
    """Timeout of one command in seconds, unless the tool that runs it sets another."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory limit of one command, in bytes."""


class OutputSection(Section):
    """Files that a run writes."""

    trajectories: str | None = None
    """JSONL file to which a row is appended as each trajectory ends."""


class TaskFile(Section):
    """Contents of a task file (`AutoAgentRunner.from_task`)."""

    imports: list[str] = Field(default_factory=list)
    """Modules on the Python path that are imported first: those in which tools, agents, dispatchers or backends are
    registered."""
    agent_cls: str = "skyrl_agent.agents.react.ReActAgent"
    """Dotted path of the agent class: a subclass of `Agent` or `BaseTrajectory`, or one of
    `AGENT_TRAJECTORY_REGISTRY`."""
    agent_config: JsonObject = Field(default_factory=dict)
    """Arguments of the agent: `max_depth` (of sub-agents), `sub_agent_steps` (of all of them together), `max_repeats`
    (number of equal turns that count as a loop)."""
    task: str
    """Dotted path of a `BaseTask` subclass."""
    task_config: JsonObject = Field(default_factory=dict)
    """Arguments of the task."""
    tools: list[str | dict[str, JsonObject]] | JsonObject | None = None
    """Tools by registry name, or as `{name: {arguments of the tool}}`. A dotted path names a tool class, or a tool
    group of skyrl_gym, with all its tools or those in `only: [names]`; `mcp: {command: [...]}` or `mcp: {url: ...}` the
    tools of an MCP server. A map of flags (`enable_bash: true`) for agents that take flags. None: the task's own."""
    data: DataSection = DataSection()
    generator: GeneratorSection = GeneratorSection()
    dispatcher: DispatcherSection = DispatcherSection()
    runtime: RuntimeSection = RuntimeSection()
    output: OutputSection = OutputSection()


def load_task_file(path: str | Path) -> TaskFile:
    """Read a task file. The key `extends` names a base file (relative path) that provides missing keys.

    Raises:
        FileNotFoundError: the file does not exist.
        ConfigError: the file is not a YAML mapping, extends itself, or has an invalid key or value.
    """
    return read_task(_read_content(Path(path), ()), str(path))


def _read_content(path: Path, extended_by: tuple[Path, ...]) -> JsonObject:
    if path.resolve() in extended_by:
        raise ConfigError(f"{extended_by[0]}: `extends` returns to {path}; a file must not extend itself")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a task file is a mapping of keys; got {type(content).__name__}")
    base = content.pop("extends", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends must be the path of another task file; got {base!r}")
    return _merge_sections(content, _read_content(path.parent / base, (*extended_by, path.resolve())))


def _merge_sections(content: JsonObject, base: JsonObject) -> JsonObject:
    """Merge two mappings: sections key by key, any other value as a whole."""
    merged = dict(base)
    for key, value in content.items():
        below = merged.get(key)
        merged[key] = _merge_sections(value, below) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def read_task(content: JsonObject, source: str = "task") -> TaskFile:
    """Read a task file's contents from a mapping; see `load_task_file`. Keys with null count as missing."""
    try:
        return TaskFile.model_validate(_remove_nulls(content))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_format_error(item)}" for item in error.errors())) from None


def _remove_nulls(value: Any) -> Any:
    return {k: _remove_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _format_error(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        prefix = "".join(f"{part}." for part in item["loc"][:-1])
        hint = did_you_mean(item["loc"][-1], _list_known_keys(item["loc"][:-1]), prefix=prefix)
        return f"unknown key {key}; {hint}"
    if item["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {item['msg'][:1].lower()}{item['msg'][1:]}; got {item['input']!r}"


def _list_known_keys(location: tuple[Any, ...]) -> list[str]:
    section: Any = TaskFile
    for part in location:
        section = section.model_fields[part].annotation
    return list(section.model_fields)
