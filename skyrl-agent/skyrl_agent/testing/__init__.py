"""Kits for tests of agents, tools, tasks and backends: tiny real things, no downloads."""

from skyrl_agent.testing.scripted import Script, ScriptedModel
from skyrl_agent.testing.tokenizer import byte_tokenizer

__all__ = ["Script", "ScriptedModel", "byte_tokenizer"]
