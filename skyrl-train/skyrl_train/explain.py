"""`python -m skyrl_train.explain RUN`: see `skyrl_inspect.explain`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.explain", run_name="__main__", alter_sys=True)
