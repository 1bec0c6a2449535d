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
    """The part of the row handed to the task; none: the whole row."""
    instance_id_key: str | None = None
    """None: the row's position in the batch."""
    data_source_key: str | None = None
    """None: `default`."""


class GeneratorValSection(Section):
    """Settings of evaluation batches; missing ones are as in training."""

    num_trajectories: int | None = Field(default=None, ge=1)
    """Of each instance."""
    sampling_params: JsonObject | None = None
    """Laid over `generator.sampling_params`."""


class GeneratorSection(Section):
    """Settings of the model and of the agent loop."""

    infer_backend: str = "skyrl-train"
    """`skyrl-train`, `tinker`, `openai_server`, `verl`, or what `register_backend` was told. Trainers take their own
    whatever stands here."""
    backend_config: JsonObject = Field(default_factory=dict)
    """Keywords of that backend."""
    num_trajectories: int = Field(default=1, ge=1)
    """Of each instance: a group. The trainer's `n_samples_per_prompt` must be the same."""
    max_iterations: int = Field(default=5, ge=1)
    """Steps of an agent: one answer of the model and the tools it called."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Tokens after the initial prompt, the model's and the tools' together. (The name is historical.)"""
    max_context_length: int | None = Field(default=None, ge=2)
    """Tokens that the model reads and writes in one turn, the prompt included; none: not limited here."""
    sampling_params: JsonObject = Field(default_factory=dict)
    """Handed to the backend. `max_tokens` bounds one turn (and is cut to what the budget has left)."""
    val_config: GeneratorValSection = GeneratorValSection()
    remove_think_tokens: bool = False
    """Drops the thoughts of earlier turns from what the model reads. Each turn is then a training row of its own."""
    vision_is_active: Literal[False] = False
    """Images are not read yet."""
    qwen3_enable_thinking: bool = True
    """The chat template's `enable_thinking`."""
    qwen3_acc_thinking: bool = False
    """Keeps the thoughts of earlier turns, by the template `qwen3_acc_thinking`."""
    chat_template: str | None = None
    """Path of a Jinja template to use in place of the tokenizer's."""
    tool_format: Literal["function_xml", "hermes", "llama3_json", "gpt_oss"] = "function_xml"
    """How the model writes calls. `function_xml`: `<function=name>`, explained in the system message; the others are
    native to models: the chat template is given the schemas."""
    max_parallel_tool_calls: int = Field(default=1, ge=1)
    """Calls of one turn that are run: at the same time, or one after another on a runtime. `function_xml` has one."""
    tool_timeout_seconds: float = Field(default=600.0, gt=0)
    """Of one call; the model is told, and goes on."""
    max_tool_output_chars: int = Field(default=10_000, ge=200)
    """Longer output is cut in the middle, with a note."""
    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Of one answer of the model."""
    profile_tools: bool = False
    """Adds counts of tool calls to `rollout_metrics`."""
    debug_log: bool = False
    """Logs tool calls and the beginning of their outputs."""
    early_step_threshold: int = Field(default=0, ge=0)
    """Reminders ask for at least so many steps."""
    enable_turn_reminder: bool = False
    """Tells the model before each turn how many steps are left."""


class DispatcherValSection(Section):
    """Limits of evaluation batches; missing ones are as in training."""

    max_parallel_agents: int | None = Field(default=None, ge=1)
    """As above, of evaluation batches."""
    max_eval_parallel_agents: int | None = Field(default=None, ge=1)
    """As above, of evaluation batches."""


class StageLimits(Section):
    """Limits of one stage; missing ones follow from the dispatcher's type."""

    parallel: int | None = Field(default=None, ge=1)
    """Trajectories in the stage at a time."""
    queue: int | None = Field(default=None, ge=0)
    """Trajectories that may wait before the stage, having passed the one before it."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Of one attempt."""
    retries: int | None = Field(default=None, ge=0)
    """After infrastructure failures."""


class DispatcherSection(Section):
    """Settings of the scheduler."""

    type: str = "async_pipeline"
    """`async_pipeline`, `async_batch`, `async_batch_bounded`, `async_fix_pool`, or a registered one."""
    max_parallel_agents: int = Field(default=32, ge=1)
    """`async_pipeline`: trajectories that are initialized at a time, and as many that generate. `async_batch_bounded`:
    those alive. `async_batch` takes all."""
    max_eval_parallel_agents: int = Field(default=32, ge=1)
    """`async_pipeline`: trajectories that are evaluated at a time."""
    val_config: DispatcherValSection = DispatcherValSection()
    initialize: StageLimits = StageLimits()
    generate: StageLimits = StageLimits()
    evaluate: StageLimits = StageLimits()
    order: Literal["trajectories", "instances"] = "trajectories"
    """Who goes first: the first trajectory of every instance, then the second of each; or all of the first instance, so
    that groups complete early (streaming)."""
    num_environments: int | None = Field(default=None, ge=1)
    """Of `async_fix_pool`: environments made once and lent to one trajectory at a time."""
    close_timeout_seconds: float = Field(default=30.0, gt=0)
    """Of closing a trajectory's runtime."""
    progress: bool = False
    """A live progress bar on standard error."""
    scheduler: str | None = None
    """Read by nothing; task files of other releases have it."""


class RuntimeSection(Section):
    """Laid over the task's own wishes for its runtime."""

    kind: Literal["auto", "local", "docker", "remote"] | None = None
    """`local` is bubblewrap on this machine, `remote` a server of `python -m skyrl_agent.services.runtime`."""
    image: str | None = None
    """Of containers."""
    url: str | None = None
    """Of the remote server."""
    token_env: str | None = None
    """Environment variable with the remote server's token."""
    lease_seconds: float | None = Field(default=None, gt=0)
    """A runtime whose owner has not been heard of for so long is removed."""
    command_timeout_seconds: float | None = Field(default=None, gt=0)
    """Of one command, unless the tool that runs it says otherwise."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Of one command."""


class OutputSection(Section):
    """Files that a run writes."""

    trajectories: str | None = None
    """JSONL file; a row is added as each trajectory ends."""


class TaskFile(Section):
    """Contents of a task file (`AutoAgentRunner.from_task`)."""

    agent_cls: str = "skyrl_agent.agents.react.ReActAgent"
    """Dotted path, as in `AGENT_TRAJECTORY_REGISTRY`."""
    agent_config: JsonObject = Field(default_factory=dict)
    """Keywords of the agent: `max_depth` (of sub-agents), `sub_agent_steps` (of all of them together), `max_repeats`
    (equal turns that are a loop)."""
    task: str
    """Dotted path of a `BaseTask`."""
    task_config: JsonObject = Field(default_factory=dict)
    """Keywords of the task."""
    tools: list[str | dict[str, JsonObject]] | JsonObject | None = None
    """Registry names, or `{name: {keywords of the tool}}`; a map of flags (`enable_bash: true`) for agents that take
    flags; none: the task's own."""
    data: DataSection = DataSection()
    generator: GeneratorSection = GeneratorSection()
    dispatcher: DispatcherSection = DispatcherSection()
    runtime: RuntimeSection = RuntimeSection()
    output: OutputSection = OutputSection()


def load_task_file(path: str | Path) -> TaskFile:
    """Read a task file. Its key `extends` names another (relative to it) whose keys hold where it has none.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is no YAML mapping, it extends itself, or a key or value is wrong.
    """
    return read_task(_content(Path(path), ()), str(path))


def _content(path: Path, extended_by: tuple[Path, ...]) -> JsonObject:
    if path.resolve() in extended_by:
        raise ConfigError(f"{extended_by[0]}: `extends` comes back to {path}; a file must not extend itself")
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
    return _laid_over(content, _content(path.parent / base, (*extended_by, path.resolve())))


def _laid_over(content: JsonObject, base: JsonObject) -> JsonObject:
    """Merge two mappings: sections key by key, any other value as a whole."""
    merged = dict(base)
    for key, value in content.items():
        below = merged.get(key)
        merged[key] = _laid_over(value, below) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def read_task(content: JsonObject, source: str = "task") -> TaskFile:
    """Read a task file's contents from a mapping; see `load_task_file`. Keys with null count as missing."""
    try:
        return TaskFile.model_validate(_without_nulls(content))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(item)}" for item in error.errors())) from None


def _without_nulls(value: Any) -> Any:
    return {k: _without_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _explain(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        prefix = "".join(f"{part}." for part in item["loc"][:-1])
        hint = did_you_mean(item["loc"][-1], _known_keys(item["loc"][:-1]), prefix=prefix)
        return f"unknown key {key}; {hint}"
    if item["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {item['msg'][:1].lower()}{item['msg'][1:]}; got {item['input']!r}"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    section: Any = TaskFile
    for part in location:
        section = section.model_fields[part].annotation
    return list(section.model_fields)
