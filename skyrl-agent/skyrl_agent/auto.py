"""The entrance: a task file in, a runner of its agent out."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_agent.agents.mapping import AGENT_GENERATOR_REGISTRY, resolve_agent_class
from skyrl_agent.config.task_file import TaskFile, load_task_file
from skyrl_agent.dotted_paths import import_modules
from skyrl_agent.types import Tokenizer

if TYPE_CHECKING:
    from skyrl_agent.runner import AgentRunner


class AutoAgentRunner:
    """Factory of the runner that a task file's `agent_cls` is registered with."""

    @classmethod
    def from_task(
        cls,
        task_yaml: str | Path,
        infer_engine: object,
        tokenizer: Tokenizer,
        *,
        infer_backend: str | None = None,
        backend_config: Mapping[str, object] | None = None,
    ) -> "AgentRunner":
        """
        Args:
            infer_engine: inference engine, engine client or sampling client of the backend; None for `openai_server`.
            tokenizer: the model's transformers tokenizer.
            infer_backend, backend_config: override the task file's values, so that it works with any backend unchanged.

        Raises:
            FileNotFoundError: the task file does not exist.
            ConfigError: a key or value is invalid, or the agent, task, tool or backend is unknown.
        """
        cfg = load_task_file(task_yaml)
        if infer_backend is not None:
            backend = {"infer_backend": infer_backend, "backend_config": dict(backend_config or {})}
            cfg = cfg.model_copy(update={"generator": cfg.generator.model_copy(update=backend)})
        return cls.from_task_file(cfg, infer_engine, tokenizer)

    @classmethod
    def from_task_file(cls, cfg: TaskFile, infer_engine: object, tokenizer: Tokenizer) -> "AgentRunner":
        """Build the runner of a task file that is loaded already; see `from_task`."""
        import_modules(cfg.imports)
        return resolve_agent_class(cfg.agent_cls, AGENT_GENERATOR_REGISTRY)(cfg, infer_engine, tokenizer)
