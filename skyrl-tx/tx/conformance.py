"""`python -m tx.conformance`: former name of `python -m tx_conformance`."""

import runpy

runpy.run_module("tx_conformance", run_name="__main__", alter_sys=True)
