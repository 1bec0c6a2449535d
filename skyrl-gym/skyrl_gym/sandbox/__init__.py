"""Running untrusted code: `make_sandbox` gives a `Sandbox`."""

from skyrl_gym.sandbox.backends import make_sandbox
from skyrl_gym.sandbox.base import ExecResult, Limits, Sandbox, SandboxProcess

__all__ = ["ExecResult", "Limits", "Sandbox", "SandboxProcess", "make_sandbox"]
