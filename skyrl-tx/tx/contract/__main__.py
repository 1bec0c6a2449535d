"""`python -m tx.contract`, an alias of `python -m tx.conformance`."""

import runpy

runpy.run_module("tx.conformance", run_name="__main__", alter_sys=True)
