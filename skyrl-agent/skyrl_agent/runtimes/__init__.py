from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, RuntimeSpec, Snapshot

__all__ = ["ExecResult", "Limits", "Runtime", "RuntimeSpec", "Snapshot"]
