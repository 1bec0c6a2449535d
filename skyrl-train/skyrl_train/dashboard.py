"""`python -m skyrl_train.dashboard RUNS_DIR`: see `skyrl_inspect.dashboard`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.dashboard", run_name="__main__", alter_sys=True)
