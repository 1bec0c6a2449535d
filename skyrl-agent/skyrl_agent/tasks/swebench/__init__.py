"""Repositories' issues in container images: SWE-bench, SWE-Gym, SWE-smith, R2E-Gym."""

from skyrl_agent.tasks.swebench.utils import SWEBenchTask

__all__ = ["SWEBenchTask"]
