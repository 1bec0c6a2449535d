"""`python -m skyrl_train.replay RUN --sample UID_N`: see `skyrl_inspect.replay`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.replay", run_name="__main__", alter_sys=True)
