"""The built-in environments, registered by name. Their modules are imported when one is made."""

from skyrl_gym.envs.registration import deregister, register

__all__ = ["deregister", "register"]

register(id="gsm8k", entry_point="skyrl_gym.envs.gsm8k.env:GSM8kEnv")
register(id="gsm8k_multi_turn", entry_point="skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv")
register(id="multiply", entry_point="skyrl_gym.envs.multiply.env:MultiplyEnv")
register(id="arithmetic", entry_point="skyrl_gym.envs.arithmetic.env:ArithmeticEnv")
register(id="calculator", entry_point="skyrl_gym.envs.calculator.env:CalculatorEnv")
