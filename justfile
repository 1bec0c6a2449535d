# What a developer does every day. `just` alone lists it.
default:
    @just --list

# Make .venv with everything in it; arguments go to `uv sync`, e.g. `just setup --extra tracking`.
setup *args:
    scripts/setup.sh {{ args }}

# Format, lint, types: what CI checks before it tests.
check:
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    .venv/bin/pyright

# Mend what can be mended by machine.
fix:
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

# The tests of `make test`, without its set-up.
test *args:
    .venv/bin/python -m pytest -m "not slow and not full and not gpu and not network" {{ args }}

# No Ray, no servers.
test-fast *args:
    .venv/bin/python -m pytest -m "not process and not slow and not full and not gpu and not network" {{ args }}

# What `.ci/run` runs after `make test`.
test-slow *args:
    .venv/bin/python -m pytest -m "slow and not full and not gpu and not network" {{ args }}

# Matrices, every seed, whole data sets: kills at random points, quickstart over three seeds.
test-full *args:
    .venv/bin/python -m pytest -m full {{ args }}

test-gpu *args:
    .venv/bin/python -m pytest -m gpu {{ args }}

# Pages that are made from the code.
docs:
    .venv/bin/python -m skyrl_train.config.document > docs/configuration.md
    .venv/bin/python -m tx.run.document > docs/tinker-settings.md
    .venv/bin/python -m skyrl_agent.config.document > docs/agent-settings.md
    .venv/bin/python -m skyrl_train_testing.architectures > docs/models.md

# All runs of a folder in the browser.
dashboard runs="runs":
    .venv/bin/python -m skyrl_train.dashboard {{ runs }}
