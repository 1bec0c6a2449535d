"""The built-in environments, registered by name. Their modules are imported when one is made."""

from skyrl_gym.envs.registration import deregister, register, register_installed

__all__ = ["deregister", "register"]

register(id="gsm8k", entry_point="skyrl_gym.envs.gsm8k.env:GSM8kEnv")
register(id="gsm8k_multi_turn", entry_point="skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv")
register(id="math", entry_point="skyrl_gym.envs.math.env:MathEnv")
register(id="aime", entry_point="skyrl_gym.envs.aime.env:AIMEEnv")
register(id="multiply", entry_point="skyrl_gym.envs.multiply.env:MultiplyEnv")
register(id="arithmetic", entry_point="skyrl_gym.envs.arithmetic.env:ArithmeticEnv")
register(id="calculator", entry_point="skyrl_gym.envs.calculator.env:CalculatorEnv")
register(id="llm_as_a_judge", entry_point="skyrl_gym.envs.llm_as_a_judge.env:LLMJudgeEnv")
register(id="code", entry_point="skyrl_gym.envs.code.env:CodeEnv")
register(id="lcb", entry_point="skyrl_gym.envs.lcb.env:LCBEnv")
register(id="searchcode", entry_point="skyrl_gym.envs.searchcode.env:SearchCodeEnv")
register(id="search", entry_point="skyrl_gym.envs.search.env:SearchEnv")
register(id="text2sql", entry_point="skyrl_gym.envs.sql.env:SQLEnv")
register(id="reasoning_gym", entry_point="skyrl_gym.envs.reasoning_gym.env:ReasoningGymEnv")
register(id="gymnasium", entry_point="skyrl_gym.envs.gymnasium.env:GymnasiumEnv")
register(id="tool_call", entry_point="skyrl_gym.envs.tool_call.env:ToolCallEnv")
register(id="textworld", entry_point="skyrl_gym.envs.textworld.env:TextWorldEnv")
register(id="rlm", entry_point="skyrl_gym.envs.rlm.env:RLMEnv")
register_installed()
