# The two commands of the README, on a machine with nothing but Python and pip.
.PHONY: quickstart test test-fast setup

quickstart: setup
	.venv/bin/python examples/quickstart/run.py

test: setup
	.venv/bin/python -m pytest -m "not full and not gpu and not network"

test-fast: setup
	.venv/bin/python -m pytest -m "not slow and not full and not gpu and not network"

setup:
	scripts/setup.sh
