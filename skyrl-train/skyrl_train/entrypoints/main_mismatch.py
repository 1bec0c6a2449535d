"""`python -m skyrl_train.entrypoints.main_mismatch key=value …`: see `skyrl_inspect.mismatch`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.mismatch", run_name="__main__", alter_sys=True)
