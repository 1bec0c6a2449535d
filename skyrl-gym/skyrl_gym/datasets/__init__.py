"""Published problems as dataset rows: functions from one problem to a row, and `hub`, the only module with a network.

A row has the columns `prompt` and `env_class`, and what its environment reads. Dataset builders (`examples/`) and
evaluation suites (`skyrl_gym.eval.suites`) make their rows here.
"""
