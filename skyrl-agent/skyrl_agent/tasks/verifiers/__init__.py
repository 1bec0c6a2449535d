"""Graders under their published names. The code is in `skyrl_gym.graders`; tasks use `skyrl_agent.tasks.grading`.

All raise `InfraError` where what they stand on does not work; that is never a score of 0.
"""
