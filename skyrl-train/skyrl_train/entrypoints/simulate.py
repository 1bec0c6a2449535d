"""`python -m skyrl_train.entrypoints.simulate RUN`: see `skyrl_inspect.simulate`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.simulate", run_name="__main__", alter_sys=True)
