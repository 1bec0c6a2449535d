"""Graders under their published names. The code is in `skyrl_gym.graders`; tasks use `skyrl_agent.tasks.grading`.

All raise `InfraError` if infrastructure fails; such a failure is never a score of 0.
"""
