"""Tools that environments offer to a model."""

from skyrl_gym.tools.calculator import CalculatorToolGroup
from skyrl_gym.tools.core import ToolGroup, tool

__all__ = ["CalculatorToolGroup", "ToolGroup", "tool"]
