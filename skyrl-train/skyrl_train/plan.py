"""`python -m skyrl_train.plan key=value …`: see `skyrl_inspect.plan`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.plan", run_name="__main__", alter_sys=True)
