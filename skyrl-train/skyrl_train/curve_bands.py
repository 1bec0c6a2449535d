"""`python -m skyrl_train.curve_bands RUN...`: see `skyrl_inspect.curve_bands`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("skyrl_inspect.curve_bands", run_name="__main__", alter_sys=True)
