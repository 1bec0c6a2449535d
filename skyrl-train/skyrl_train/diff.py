"""`python -m skyrl_train.diff A B`: see `skyrl_inspect.diff`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.diff", run_name="__main__", alter_sys=True)
