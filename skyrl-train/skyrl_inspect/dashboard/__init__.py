"""Dashboard of run folders in a browser, from their files alone. `python -m skyrl_train.dashboard RUNS_DIR`

Nothing here is imported by a training process, and nothing here writes.
"""
