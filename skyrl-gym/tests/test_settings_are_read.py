"""Every setting of every environment is read when the environment is made, or plays one of its examples."""

import asyncio
import dataclasses
import inspect
import re
from contextlib import suppress
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.check import examples_of, spec_of
from skyrl_gym.envs.registration import env_class_of, registry
from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.testing import require_sandbox

from .sandboxed import RUNS_CODE

CONFIGS: dict[str, type] = {
    env_id: config_class
    for env_id, spec in sorted(registry.items())
    if str(spec.entry_point).startswith("skyrl_gym.")
    and (config_class := getattr(env_class_of(spec), "config_class", None)) is not None
}
NO_SERVICE = {
    "base_url": "http://127.0.0.1:9/v1",
    "model": "nobody",
    "retry_seconds": 0.0,
    "retry_wait": 0.0,
    "max_retries": 0,
    "timeout": 1.0,
}
"""Services that an environment may ask are not there."""


def watch(config_class: type, patch: pytest.MonkeyPatch) -> set[str]:
    """The names of the settings that are read from now on of any config of the class; not what its own checks read."""
    names = {field.name for field in dataclasses.fields(config_class)}
    read: set[str] = set()
    begin: Any = config_class.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before = set(read)
        begin(self, *args, **kwargs)
        read.intersection_update(before)

    def get(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    patch.setattr(config_class, "__init__", init)
    patch.setattr(config_class, "__getattribute__", get, raising=False)
    return read


async def play(env_id: str, example: Any, actions: list[str], config: Any) -> None:
    env = skyrl_gym.make(env_id, env_config=config, extras=dict(example.extras))
    try:
        await settled(env.init(example.prompt))
        for action in actions:
            await settled(env.step(action))
    finally:
        await settled(env.close())


async def settled(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


@pytest.mark.parametrize("env_id", CONFIGS)
def test_every_environment_setting_is_read(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if env_id in RUNS_CODE:
        require_sandbox()
    config_class = CONFIGS[env_id]
    names = {field.name for field in dataclasses.fields(config_class)}
    read = watch(config_class, monkeypatch)
    for example in examples_of(spec_of(env_id)):
        values = {**example.env_config, **{name: value for name, value in NO_SERVICE.items() if name in names}}
        for actions in (example.oracle, [re.sub(r"\d", "7", action) for action in example.oracle]):  # right, and not
            with suppress(InfraError):
                asyncio.run(play(env_id, example, actions, values))
        if read == names:
            break
    assert sorted(names - read) == []
