"""Every environment of the package, as parameters of tests."""

import importlib.util

import pytest

import skyrl_gym

PACKAGES = {
    "gymnasium": "gymnasium",
    "reasoning_gym": "reasoning_gym",
    "search": "bm25s",
    "searchcode": "bm25s",
}
"""Package that an environment's examples need besides this one."""

SLOW = {"code", "lcb", "math", "rlm", "textworld"}
"""Environments whose audit takes more than ten seconds."""


def _parameter(env_id):
    marks = [pytest.mark.slow] if env_id in SLOW else []
    package = PACKAGES.get(env_id)
    if package is not None and importlib.util.find_spec(package) is None:
        marks.append(pytest.mark.skip(reason=f"{env_id} needs {package}"))
    return pytest.param(env_id, marks=marks)


EVERY_ENVIRONMENT = pytest.mark.parametrize("env_id", [_parameter(env_id) for env_id in sorted(skyrl_gym.registry)])
